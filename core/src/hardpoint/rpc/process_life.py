"""What a child process arranges with Linux about its own life. Called in nurseries and workers."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_USER_TIME, _SYSTEM_TIME, _ARG_START, _ARG_END = 14, 15, 48, 49
"""Fields of ``/proc/PID/stat`` (proc(5) counts them from 1: utime, stime, arg_start, arg_end)."""


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when the thread of ``parent`` that started it
    ends; if that has happened already, end at once.

    The setting is lost by no exec, but is not passed on to children.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:  # it died before the line above; somebody else is the parent now
        os._exit(128 + int(signal.SIGKILL))


def thread_count() -> int:
    """Return how many threads this process has, those of native libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (or a debugger); False if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "Tt"


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0.0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = int(fields[_USER_TIME - 3]) + int(fields[_SYSTEM_TIME - 3])
    return ticks / os.sysconf("SC_CLK_TCK")


def members(group: int, session: int) -> list[int]:
    """Return the processes of a process group, as far as they are of ``session`` as well: numbers
    are used again, but hardly both at once.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z" and int(fields[2]) == group and int(fields[3]) == session:
            found.append(int(folder.name))
    return found


def set_title(title: str) -> None:
    """Show ``title`` for this process in ``ps`` and ``top``.

    Its first 15 bytes become the name of the main thread; the command line is overwritten as far as
    the original one reaches. Where that is not possible, nothing happens: it is for people.
    """
    _prctl(_PR_SET_NAME, title.encode()[:15])
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START - 3]), int(fields[_ARG_END - 3])
    except (OSError, IndexError, ValueError):
        return
    length = end - start
    if 0 < length < 1 << 20:
        text = title.encode()[: length - 1]
        ctypes.memmove(start, text + b"\0" * (length - len(text)), length)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    nothing = ctypes.c_ulong(0)
    if _library().prctl(ctypes.c_int(option), argument, nothing, nothing, nothing) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
