"""A look at what a run has left, by a process that has nothing to do with it.

Started by :class:`Outside`; reads /proc and folders, imports nothing of ours. One JSON line per
question: the marker that the run's processes carry in their environment, and the folders to list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

VARIABLE = "HP_FAULTS_RUN"
"""Set in a driver's environment, and so in that of all that it starts."""


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


def unused(paths: list[str]) -> list[str]:
    """Return which of these files no living process has open or mapped."""
    left = set(paths)
    for folder in Path("/proc").iterdir():
        if not left:
            break
        if not folder.name.isdigit():
            continue
        try:
            maps = (folder / "maps").read_text()
            links = {str(link.readlink()) for link in (folder / "fd").iterdir()}
        except OSError:
            continue
        left = {path for path in left if path not in links and path not in maps}
    return sorted(left)


def look(marker: str, folders: list[str], known: list[str] | None = None) -> dict[str, object]:
    """Return what is there: of files, with ``known``, those that are new and that nobody uses."""
    running = processes(marker)
    files = sorted(str(path) for folder in folders for path in Path(folder).rglob("*"))
    if known is not None:
        files = unused([path for path in files if path not in set(known)])
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
    for question in sys.stdin:
        sys.stdout.write(json.dumps(look(*json.loads(question))) + "\n")
        sys.stdout.flush()
