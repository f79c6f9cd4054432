"""The driver's hold of its nursery: started by a thread that lives as long, spoken to by a lane."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from hardpoint.errors import ExecutorFailedError
from hardpoint.rpc.process_life import members, processor_time

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.loop import LONGEST_WAIT, Loop, left_until
from hardpoint_multiproc.output import Output

KEY = -1
"""The nursery's key among the outputs."""

_ENTRY = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    "from hardpoint_multiproc.nursery import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""What the nursery's own variables are, so that it can be forked: libraries start no thread when
imported, and torch loads no vendor's backend. Workers get the driver's values back.
"""

KILL_SECONDS = 1.0
"""How long an end is waited for: that of a nursery whose workers have ended, and by SIGKILL."""

LOOK_SECONDS = 0.5
"""How often a nursery that imports is looked at."""

LEAST_SHARE = 0.02
"""Share of a processor from which on a nursery that imports counts as one that comes further."""


def interpreter() -> list[str]:
    """Return the command of an interpreter like this one: same program, same strictness."""
    if not sys.executable:
        raise ExecutorFailedError(
            "this program does not know the interpreter that runs it (sys.executable is empty), so "
            "it cannot start others; use executor = 'uni'"
        )
    flags = sys.flags
    command = [sys.executable, "-P"]  # what lies in the current folder must not pass for a library
    command += ["-" + "O" * flags.optimize] if flags.optimize else []
    command += ["-B"] if sys.dont_write_bytecode else []
    command += ["-E"] if flags.ignore_environment and not flags.isolated else []
    command += ["-I"] if flags.isolated else ["-s"] if flags.no_user_site else []
    command += ["-X", "utf8"] if flags.utf8_mode else []
    return command


class NurseryStuckError(Exception):
    """A nursery came no further for ``seconds``, and was not ready."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the nursery came no further for {seconds:.1f} s")
        self.seconds = seconds


class NurseryProcess:
    """One nursery and the thread that started it, which is also where the driver waits for workers.

    ``preload`` are modules to import before workers are forked; None: workers are to be started
    plain, and the nursery imports nothing. Building it returns at once; :attr:`ready` tells when
    it may fork, with the reason why it may not (empty: it may). Whoever drops it unclosed has it
    closed.
    """

    def __init__(self, preload: Sequence[str] | None) -> None:
        self._state = state = _State(None if preload is None else tuple(preload))
        self._finalizer = weakref.finalize(self, _State.close, state, KILL_SECONDS)
        # Only now is anything started: an interrupt from here on has it closed.
        state.loop.start()
        self.output = state.output
        self.loop = state.loop
        self.ready = state.ready

    @property
    def pid(self) -> int | None:
        """The nursery's process, or None before it is started."""
        process = self._state.process
        return None if process is None else process.pid

    @property
    def exit(self) -> int | None:
        """Its exit code or negative signal; None while it runs."""
        process = self._state.process
        return None if process is None else process.returncode

    def wait_ready(self, seconds: float) -> str:
        """Wait for :attr:`ready` and return it. Raises NurseryStuckError once the nursery has not
        come any further, by its processor time, for ``seconds``.
        """
        work, idle, last = 0.0, 0.0, time.monotonic()
        while True:
            with suppress(TimeoutError):
                return self.ready.result(min(seconds, LOOK_SECONDS))
            now = time.monotonic()
            used = processor_time(self.pid) if self.pid else 0.0
            # What was longer than a look is time in which this process itself stood still.
            idle += min(now - last, 2 * LOOK_SECONDS)
            if used - work >= LEAST_SHARE * (now - last):
                idle = 0.0
            if idle >= seconds:
                raise NurseryStuckError(idle)
            work, last = used, now

    def listen(
        self, heard: Callable[[dict[str, Any], list[int]], None], died: Callable[[int | None], None]
    ) -> None:
        """Have ``heard(message, descriptors)`` called for what the nursery reports of workers, and
        ``died(exit)`` once if it ends, both on the loop's thread.
        """
        self._state.listen(heard, died)

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message; any thread. Raises ExecutorFailedError if the nursery is gone."""
        self._state.tell(message, fds)

    def close(self, within: float = KILL_SECONDS) -> None:
        """End the nursery, and with it every worker that is left. Idempotent."""
        self._finalizer.detach()
        self._state.close(within)


class _State:
    """All that a nursery needs; it knows nothing of who uses it, so that they can be collected."""

    def __init__(self, preload: tuple[str, ...] | None) -> None:
        self.preload = preload
        self.pid = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: Future[str] = Future()
        self.output = Output()
        self._lock = threading.Lock()
        self._closed = False
        self._ended = False
        self._heard: Callable[[dict[str, Any], list[int]], None] | None = None
        self._died: Callable[[int | None], None] | None = None
        self._lane: socket.socket | None = None
        self.loop = Loop("hardpoint-mp", self._spawn)

    def listen(
        self, heard: Callable[[dict[str, Any], list[int]], None], died: Callable[[int | None], None]
    ) -> None:
        self._heard, self._died = heard, died

    def tell(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        lane = self._lane
        if lane is None:
            raise ExecutorFailedError("the nursery, which starts and ends workers, never started")
        try:
            with self._lock:
                descriptors.send(lane, message, fds)
        except OSError as error:
            raise ExecutorFailedError(
                f"the nursery, which starts and ends workers, is gone ({error})"
            ) from error

    def _spawn(self) -> None:
        """Start the process. On the loop's thread: the process ends with the thread."""
        if self._closed:
            return
        try:
            self._run(interpreter())
        except BaseException as error:  # noqa: BLE001 - raised where `ready` is asked for
            self.ready.set_exception(error)

    def _run(self, command: list[str]) -> None:
        self.output.start()
        out = self.output.add(KEY, "nursery")
        far: socket.socket | None = None
        try:
            self._lane, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.process = subprocess.Popen(  # noqa: S603 - this very interpreter
                [*command, "-c", _ENTRY, str(far.fileno()), str(self.pid), json.dumps(sys.path)],
                env={**os.environ, **ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[far.fileno()],
                # A group of its own, for signals, but not a session: where the kernel schedules
                # sessions as wholes (autogroup), yielding the processor gives it to nobody outside.
                process_group=0,
            )
        except OSError as error:
            if not error.filename:  # a limit: not the interpreter's fault
                raise
            raise ExecutorFailedError(
                f"the interpreter {command[0]!r} (sys.executable), which was to run the workers, "
                f"cannot be started: {error.strerror}; use executor = 'uni'"
            ) from error
        finally:
            if far is not None:
                far.close()
            os.close(out)
        with suppress(ExecutorFailedError):  # it has ended already: how, the end of its lane tells
            self.tell({"op": "preload", "modules": self.preload}, ())
        self.loop.watch(self._lane.fileno(), partial(self._hear, self._lane))

    def _hear(self, lane: socket.socket) -> None:
        got = descriptors.receive(lane)
        if got is None:
            self._gone(lane)
            return
        message, fds = got
        if message["op"] == "ready":
            self.ready.set_result(message["problem"])
        elif self._heard is not None:
            self._heard(message, fds)
        else:
            descriptors.close(fds)

    def _gone(self, lane: socket.socket) -> None:
        self.loop.forget(lane.fileno())
        code = _exit_of(self.process, KILL_SECONDS)
        self._ended = True
        if not self.ready.done():
            lines = "".join(f"\n  {line}" for line in self.output.last_lines(KEY))
            self.ready.set_exception(
                ExecutorFailedError(f"the nursery {how_ended(code)} before it was ready{lines}")
            )
        if self._died is not None and not self._closed:
            self._died(code)

    def close(self, within: float) -> None:
        """End everything; in a forked child of the driver, nothing: it is the driver's."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + min(within, KILL_SECONDS)
        if self.process is not None:
            self._end(self.process, end)
        self.loop.end(max(KILL_SECONDS, min(within, LONGEST_WAIT)))
        if self.process is not None:  # it was just being started, or took too long
            self._end(self.process, 0.0)
        self.output.close(KILL_SECONDS)
        if self._lane is not None:
            self._lane.close()

    def _end(self, process: subprocess.Popen[bytes], end: float) -> None:
        """Have it end by ``end`` (monotonic s): by the end of its lane, else by SIGKILL."""
        if not self.ready.done():
            process.kill()  # it has no children yet, and would notice no request while it loads
        if self._lane is not None:
            self._lane.shutdown(socket.SHUT_WR)
        if _exit_of(process, max(0.05, left_until(end))) is None:
            process.kill()
            _exit_of(process, KILL_SECONDS)


def end_group(pid: int, session: int) -> None:
    """End what is left of the process group of a worker whose nursery is gone."""
    for each in members(pid, session):
        try:
            pidfd = os.pidfd_open(each)
        except OSError:
            continue
        try:
            if each in members(pid, session):  # it is still the one that was meant
                _signal(pidfd)
        finally:
            os.close(pidfd)


def _signal(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return


def how_ended(code: int | None) -> str:
    """Return an end as people say it."""
    if code is None:
        return "ended"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


def _exit_of(process: subprocess.Popen[bytes] | None, within: float) -> int | None:
    if process is None:
        return None
    try:
        return process.wait(within)
    except subprocess.TimeoutExpired:
        return None
