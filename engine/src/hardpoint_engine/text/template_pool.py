"""The processes that render chat templates, as the driver sees them: started, asked, ended."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue

from hardpoint_engine.text import template_process

MOST_AT_ONCE = 4
"""Renderings that go on side by side; the next one waits for one of them."""
START_LIMIT = 30.0
"""Seconds for the start of a process."""
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class SilentProcessError(Exception):
    """The process did not answer; the text continues "the model's chat template"."""


class TemplatePool:
    """Up to ``MOST_AT_ONCE`` processes, each kept for the next order. Thread-safe.

    One that takes longer than ``time_limit`` seconds for an order, answers by more than
    ``most_bytes``, or whose caller is interrupted is killed.
    """

    def __init__(self, time_limit: float, most_bytes: int) -> None:
        self._time_limit = time_limit
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        # No semaphore: an interrupt in one may leave its lock taken.
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(MOST_AT_ONCE):
            self._places.put(None)

    def start(self) -> None:
        """Start a process without waiting for it, unless there is one."""
        with self._lock:
            if not self._idle and not self._busy:
                self._idle.append(_Process(self._time_limit, self._most_bytes))

    def ask(self, line: bytes) -> Mapping[str, object]:
        """Have a process of its own do one order and return the answer. Raises
        SilentProcessError.
        """
        self._places.get()
        process = None
        try:
            process = self._taken()
            result = process.ask(line)
            self._give_back(process)
        except BaseException:
            if process is not None:
                self._end(process)
            raise
        finally:
            self._places.put(None)
        return result

    def close(self) -> None:
        """End all processes, those with an order, too. Idempotent; a later order starts a new
        one.
        """
        with self._lock:
            idle, self._idle = self._idle, []
            busy, self._busy = self._busy, set()
            for process in busy:
                process.kill()  # whoever asked it sees its end, and takes it away
        for process in idle:
            process.end()

    def _taken(self) -> _Process:
        with self._lock:
            if self._idle:
                process = self._idle.pop()
            else:
                process = _Process(self._time_limit, self._most_bytes)
            self._busy.add(process)
            return process

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if process in self._busy:
                self._busy.discard(process)
                self._idle.append(process)
                return
        process.end()  # the pool was closed meanwhile

    def _end(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
        process.end()


class _Process:
    """One child and the two pipes to it, with a deadline on every byte."""

    def __init__(self, time_limit: float, most_bytes: int) -> None:
        paths = [
            str(Path(spec.origin).parent.parent)
            for name in ("jinja2", "markupsafe")
            if (spec := importlib.util.find_spec(name)) is not None and spec.origin
        ]
        self._time_limit = time_limit
        self._most_bytes = most_bytes
        self._ready = False
        self._child = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", "-S", template_process.__file__, str(time_limit), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
            cwd="/",
        )

    def ask(self, line: bytes) -> Mapping[str, object]:
        """Send one order and return its answer. Raises SilentProcessError."""
        if not self._ready:
            self._exchange(b"", START_LIMIT, "was not begun: the process for it did not start")
            self._ready = True
        why = f"took longer than {self._time_limit:g} s to render"
        data = self._exchange(line, self._time_limit, why)
        try:
            result = json.loads(data)
        except ValueError:
            result = None
        if not isinstance(result, dict):
            raise SilentProcessError("broke the process that rendered it")
        return result

    def kill(self) -> None:
        """End the child; for any thread."""
        self._child.kill()

    def end(self) -> None:
        """Kill the child and take its exit status."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _exchange(self, line: bytes, seconds: float, why: str) -> bytes:
        """Write ``line`` and read up to the next line end, all within ``seconds``."""
        child = self._child
        if child.stdin is None or child.stdout is None:
            raise SilentProcessError("has no pipes to the process that renders it")
        deadline = time.monotonic() + seconds
        left, answer = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            os.set_blocking(child.stdin.fileno(), False)
            selector.register(child.stdout, selectors.EVENT_READ)
            if left:
                selector.register(child.stdin, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise SilentProcessError(why)
                for key, _ in ready:
                    if key.fileobj is child.stdin:
                        left = self._write(child.stdin.fileno(), left)
                        if not left:
                            selector.unregister(child.stdin)
                    else:
                        answer += self._read(child.stdout.fileno(), len(answer))
        return bytes(answer)

    def _write(self, handle: int, left: memoryview) -> memoryview:
        try:
            return left[os.write(handle, left[: 1 << 16]) :]
        except BrokenPipeError:
            raise SilentProcessError(self._ended()) from None

    def _read(self, handle: int, so_far: int) -> bytes:
        data = os.read(handle, 1 << 16)
        if not data:
            raise SilentProcessError(self._ended())
        if so_far + len(data) > self._most_bytes:
            raise SilentProcessError("gives too long an answer")
        return data

    def _ended(self) -> str:
        code = self._child.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended the process that rendered it ({how})"
