"""The nursery: the small process that starts a driver's workers, watches them and ends them.

It is single-threaded and does nothing else. Workers are its children: it forks them from itself,
with the platform's heavy modules already imported, or starts a plain interpreter for each. When the
driver asks, or is gone, it ends each worker's process group. Its messages are JSON; it loads no
plugin and unpickles nothing.

Three traps, each met in practice. A library's thread does not survive a fork, and what it held
stays held: so libraries are told to start one thread, and each fork counts threads first. A
process told to end with its parent ends with the *thread* that started it: so the driver has a
thread for that. A forked sibling would keep a lane's far end open: so each child closes all that is
not its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hardpoint.rpc.process_life import end_with_parent, set_title, thread_count

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.start_choice import NURSERY

PLAIN_ENTRY = (
    "import json, os, sys; fd = int(sys.argv[2]);"
    "spec = json.loads(os.pread(fd, os.fstat(fd).st_size, 0));"
    "sys.path[:] = spec['path'];"
    "from hardpoint_multiproc.worker_entry import main; main(spec, sys.argv[2:], int(sys.argv[1]))"
)
"""What a plain worker's interpreter runs."""

WORKER_MODULES = (
    "hardpoint_multiproc.worker_entry",
    "hardpoint.rpc.shared_memory.worker_end",
    "cattrs",
    "packaging.requirements",
)
"""What every worker needs of Hardpoint itself, and what that imports when it first needs it. There
is no plugin among it.
"""


class Nursery:
    """Serves one driver over ``lane`` until it is told to stop, or the lane ends."""

    def __init__(self, lane: socket.socket) -> None:
        self._lane = lane
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(lane, select.POLLIN)
        self._ranks: dict[int, int] = {}
        """pidfd -> rank."""
        self._pids: dict[int, int] = {}
        """rank -> pid, of workers that were not reaped yet."""
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)  # it only wakes the loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._poll.register(self._woken, select.POLLIN)
        self._own = {lane.fileno(), self._woken, wake}

    def preload(self, modules: Sequence[str] | None) -> None:
        """Import ``modules`` and what every worker needs (None: nothing, as none will be forked);
        report how that went.
        """
        started = time.monotonic()
        problem = ""
        try:
            for name in () if modules is None else (*modules, *WORKER_MODULES):
                importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a module's own; workers then start plain
            traceback.print_exc()
            problem = f"importing it raised {type(error).__name__}: {error}"
        gc.collect()
        gc.freeze()
        self._tell(op="ready", seconds=time.monotonic() - started, problem=problem)

    def serve(self) -> None:
        """Obey until the driver is gone or asks to stop; then end every worker."""
        try:
            while self._turn():
                pass
        finally:
            self._end_all()

    def _turn(self) -> bool:
        _fault("nursery.idle")
        for fd, _ in self._poll.poll():
            if fd == self._woken:
                return False
            if fd in self._ranks:
                self._reap(fd)
            elif not self._obey():
                return False
        return True

    def _obey(self) -> bool:
        got = descriptors.receive(self._lane)
        if got is None:
            return False
        message, fds = got
        try:
            if message["op"] == "start":
                self._start(message, fds)
            elif message["op"] == "signal":
                self._signal(message["rank"], message["signal"])
        finally:
            descriptors.close(fds)
        return bool(message["op"] != "stop")

    # Start.

    def _start(self, message: Mapping[str, Any], fds: list[int]) -> None:
        rank = message["rank"]
        _fault("nursery.before_fork", rank)
        if "refused" in message:
            self._tell(op="failed", rank=rank, reason=message["refused"])
            return
        try:
            if message["way"] == NURSERY:
                if (count := thread_count()) != 1:
                    self._tell(op="refused", rank=rank, reason=f"it has {count} threads, not one")
                    return
                pid = self._fork(fds)
            else:
                pid = self._spawn(message["command"], fds)
        except OSError as error:
            self._tell(op="failed", rank=rank, reason=f"{type(error).__name__}: {error}")
            return
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd], self._pids[rank] = rank, pid
        self._poll.register(pidfd, select.POLLIN)
        self._tell(pidfd, op="started", rank=rank, pid=pid)

    def _fork(self, fds: list[int]) -> int:
        pid = os.fork()
        if pid:
            _lead_group(pid)
            return pid
        try:
            self._leave_behind()
            spec = json.loads(descriptors.contents(fds[0]))
            _take_place(spec, output=fds[1])
            from hardpoint_multiproc.worker_entry import main

            main(spec, fds, self._pid)
        except BaseException:  # noqa: BLE001 - nothing of the nursery may run on in a child
            traceback.print_exc()
        finally:
            _leave(1)

    def _leave_behind(self) -> None:
        """Give up, in a child, what is the nursery's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(self._pid)
        _lead_group(0)
        descriptors.close(self._own | set(self._ranks))
        self._lane.detach()

    def _spawn(self, command: Sequence[str], fds: list[int]) -> int:
        spec = json.loads(descriptors.contents(fds[0]))
        for fd in fds:
            os.set_inheritable(fd, True)
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, fds[1], 1),
            (os.POSIX_SPAWN_DUP2, fds[1], 2),
        ]
        return os.posix_spawn(
            command[0],
            [*command, "-c", PLAIN_ENTRY, str(self._pid), *map(str, fds)],
            spec["env"],
            file_actions=actions,
            setpgroup=0,
            setsigmask=(),
            setsigdef=[signal.SIGTERM, signal.SIGPIPE],  # SIGINT stays ignored: it is the driver's
        )

    # End.

    def _reap(self, pidfd: int) -> None:
        """Take a worker's exit status, and end what it left running: its number is still its own
        then, since it was not waited for.
        """
        rank = self._ranks.pop(pidfd)
        pid = self._pids.pop(rank)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _kill_group(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._tell(op="exited", rank=rank, pid=pid, exit=os.waitstatus_to_exitcode(status))

    def _signal(self, rank: int, signum: int) -> None:
        if rank in self._pids:
            _kill_group(self._pids[rank], signum)

    def _end_all(self) -> None:
        for pid in self._pids.values():
            _kill_group(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _tell(self, *fds: int, **message: Any) -> None:
        try:
            descriptors.send(self._lane, message, fds)
        except OSError:
            return  # the driver is gone; the lane's end is noticed where it is read


def _fault(point: str, rank: int | None = None) -> None:
    """Pass a fault point. Tests alone have any; a nursery loads nothing that it does not need."""
    if "HARDPOINT_FAULTS" in os.environ:
        from hardpoint.rpc.faults import fault

        fault(point, rank)


def _lead_group(pid: int) -> None:
    """Make a worker the leader of a group of its own; both sides do it, whoever comes first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        return  # done by the other side, or it has ended


def _kill_group(pid: int, signum: int) -> None:
    """Signal a worker that was not waited for yet, and its group; it may have left that one."""
    for send in (os.killpg, os.kill) if signum == signal.SIGKILL else (os.killpg,):
        try:
            send(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


def _take_place(spec: Mapping[str, Any], output: int) -> None:
    """Make a forked child what a new interpreter would be: streams, variables, path, folder, random
    numbers, torch's threads.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(spec["env"])
    sys.path[:] = spec["path"]
    importlib.invalidate_caches()
    for name in ("numpy.random", "torch.random"):  # Python's own is seeded anew by the fork
        module = sys.modules.get(name)
        if module is not None:
            module.seed()
    torch = sys.modules.get("torch")
    if torch is not None:  # the nursery has it start none
        torch.set_num_threads(_threads_of(spec))


def _threads_of(spec: Mapping[str, Any]) -> int:
    """Return how many threads a library would start in a new interpreter with these variables."""
    asked = spec["env"].get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(spec["cores"] or os.sched_getaffinity(0))


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def main(fd: int, parent: int) -> None:
    """Be a nursery for the process ``parent``, by the socket ``fd``, in a new interpreter."""
    end_with_parent(parent)
    # Whatever the driver blocks or ignores, children must be heard and workers reachable.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_title("hardpoint-nursery")
    os.set_inheritable(fd, False)  # its end is the nursery's end, whatever plain workers do
    lane = socket.socket(fileno=fd)
    nursery = Nursery(lane)
    got = descriptors.receive(lane)
    if got is not None:
        nursery.preload(got[0]["modules"])
        end_with_parent(parent, signal.SIGTERM)  # from now on, workers are ended first
        nursery.serve()
