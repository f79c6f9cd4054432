"""A look at what a run has left, by a process that has nothing to do with it.

Started by :class:`Outside`; reads /proc and folders, imports nothing of ours. One JSON line per
question: the marker that the run's processes carry in their environment, and the folders to list.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

VARIABLE = "HP_FAULTS_RUN"
"""Set in a driver's environment, and so in that of all that it starts."""
SHARED = "/dev/shm"
"""Where named shared memory is."""


def processes(marker: str) -> dict[int, str]:
    """Return pid -> command of every living process whose environment has the marker."""
    wanted = f"{VARIABLE}={marker}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")[:200]
        except OSError:
            continue  # it ended meanwhile, or is not ours to read
    return found


def listeners(pids: list[int]) -> list[str]:
    """Return what sockets of these processes are bound to or listen at."""
    owned = set()
    for pid in pids:
        try:
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        owned |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in owned and (fields[3] == "0A" or name.startswith("udp")):
                found.append(f"{name} {fields[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in owned and len(fields) > 7:
            found.append(f"unix {fields[7]}")
    return found


def holders(paths: list[str]) -> dict[str, set[str]]:
    """Return path -> the markers of the living processes that have it open or mapped ("": none).
    By inode: a semaphore is mapped under another name than it has, which is gone.
    """
    found: dict[str, set[str]] = {path: set() for path in paths}
    inodes = {inode_of(path): path for path in paths}
    for folder in Path("/proc").iterdir() if paths else ():
        if not folder.name.isdigit():
            continue
        try:
            maps = (folder / "maps").read_bytes()
            lines = maps.splitlines() if SHARED.encode() in maps else ()
            inside = {int(line.split()[4]) for line in lines if SHARED.encode() in line}
            inside |= {inode_of(link) for link in (folder / "fd").iterdir() if is_shared(link)}
            held = [path for inode, path in inodes.items() if inode in inside - {-1}]
            variables = (folder / "environ").read_bytes().split(b"\0") if held else []
        except OSError:
            continue
        own = next((each for each in variables if each.startswith(f"{VARIABLE}=".encode())), b"")
        for path in held:
            found[path].add(own.partition(b"=")[2].decode())
    return found


def is_shared(link: Path) -> bool:
    """Whether an open descriptor is of shared memory that has a name; False if it was closed."""
    try:
        return SHARED in str(link.readlink())
    except FileNotFoundError:
        return False


def inode_of(path: str | Path) -> int:
    """Return the number of a file; -1 where it is gone."""
    try:
        return Path(path).stat().st_ino
    except FileNotFoundError:
        return -1


class SharedMemory(threading.Thread):
    """Notes by whom each name in /dev/shm is held as soon as it is there: what somebody else's run
    leaves when it is killed is none of ours. A name that nobody seems to hold is looked at again,
    LOOKS times.
    """

    LOOKS = 3

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.held: dict[str, set[str]] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        looks: dict[str, int] = {}
        while not self.ended.wait(0.01):
            there = {str(path): looks.get(str(path), 0) for path in Path(SHARED).iterdir()}
            unknown = sorted(path for path, count in there.items() if count < self.LOOKS)
            for path, markers in holders(unknown).items():
                self.held.setdefault(path, set()).update(markers)
                there[path] = self.LOOKS if markers else there[path] + 1
            looks = there

    def is_others(self, path: str, marker: str) -> bool:
        """Whether only processes without ``marker`` were seen to have it."""
        found = self.held.get(path, set())
        return bool(found) and marker not in found


def look(
    memory: SharedMemory, marker: str, folders: list[str], known: list[str] | None = None
) -> dict[str, object]:
    """Return what is there: of files, with ``known``, those that are new, that nobody uses, and
    that are not somebody else's.
    """
    running = processes(marker)
    files = sorted(str(path) for folder in folders for path in Path(folder).rglob("*"))
    if known is not None:
        new = [path for path in files if path not in set(known)]
        unused = [path for path, markers in holders(new).items() if not markers]
        files = [path for path in unused if not memory.is_others(path, marker)]
    return {"processes": running, "listeners": listeners(list(running)), "files": files}


class Outside:
    """The other process, kept for many questions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={},
        )

    def look(self, marker: str, *folders: str, known: list[str] | None = None) -> dict:
        self._process.stdin.write(json.dumps([marker, folders, known]) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        found["processes"] = {int(pid): command for pid, command in found["processes"].items()}
        return found

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    shared_memory = SharedMemory()
    shared_memory.start()
    for question in sys.stdin:
        sys.stdout.write(json.dumps(look(shared_memory, *json.loads(question))) + "\n")
        sys.stdout.flush()
