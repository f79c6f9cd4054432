"""Messages to a prompt, by the model's own template, rendered in a process that can be killed.

Driver side. The process is started early (:meth:`ChatTemplate.start`), so that its start is hidden
behind the loading of weights, and serves until it is closed or had to be killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.errors import InvalidRequestError

TIME_LIMIT = 5.0
"""Seconds for one rendering."""
START_LIMIT = 30.0
MOST_CHARACTERS = 4 << 20
"""Length of a rendered prompt; a million tokens have about as many."""
ESCAPED = 12
"""Bytes of JSON that one character may take: a surrogate pair, escaped."""
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")

Message = Mapping[str, Any]


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is absent, broken, hostile, or refuses these messages.

    What to do: pass ``--chat-template FILE`` (``chat_template=``), or continue plain text
    (``--raw``, ``generate``).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class ChatTemplate:
    """The template of one model, and ``tool_source``, the one that is used where tools are given,
    if it has a further one. Thread-safe; renderings take turns.
    """

    def __init__(
        self,
        source: str | None,
        values: Mapping[str, str],
        *,
        tool_source: str | None = None,
        time_limit: float = TIME_LIMIT,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._source = source
        self._tool_source = tool_source
        self._values = dict(values)
        self._time_limit = time_limit
        self._most = most_characters
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process without waiting for it, if the model has a template at all."""
        with self._lock:
            if self._source is not None or self._tool_source is not None:
                self._running()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        source: str | None = None,
        **values: Any,
    ) -> str:
        """Return the prompt for ``messages``, by ``source`` if the model's own template shall not
        be used; further ``values`` reach the template by their names.

        Raises ChatTemplateError.
        """
        if source is None:
            with_tools = self._tool_source if values.get("tools") else None
            source = self._source if with_tools is None else with_tools
        if source is None:
            raise ChatTemplateError(
                "the model has no chat template; give the text that it shall continue as it is "
                "(--raw, or LLM.generate), or a template (--chat-template, or chat_template=)"
            )
        own = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        order = {
            "source": source,
            "values": {**self._values, **values, **own},
            "most_characters": self._most,
        }
        try:
            line = json.dumps(order).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"messages must be plain data: {error}") from None
        with self._lock:
            result = self._ask(self._running(), line)
        return self._text(result)

    def close(self) -> None:
        """End the process. Idempotent; a later rendering starts a new one."""
        with self._lock:
            self._end()

    def _running(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._time_limit, self._most * ESCAPED)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _ask(self, process: _Process, line: bytes) -> Mapping[str, object]:
        try:
            return process.ask(line)
        except BaseException as error:
            self._end()
            if isinstance(error, _SilentError):
                raise ChatTemplateError(f"the model's chat template {error}") from None
            raise

    def _text(self, result: Mapping[str, object]) -> str:
        if "refused" in result:
            raise ChatTemplateError(
                f"the model's chat template refuses the messages: {result['refused']}"
            )
        text = result.get("text")
        if not isinstance(text, str):
            raise ChatTemplateError(
                f"the model's chat template cannot be rendered: {result.get('error')}; "
                "go without it (--raw, or LLM.generate), or mend it"
            )
        return text


class _SilentError(Exception):
    """The process did not answer; the text continues "the model's chat template"."""


class _Process:
    """One child and the two pipes to it, with a deadline on every byte."""

    def __init__(self, time_limit: float, most_bytes: int) -> None:
        from hardpoint_engine.text import template_process

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
        """Send one order and return its answer. Raises _SilentError."""
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
            raise _SilentError("broke the process that rendered it")
        return result

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
            raise _SilentError("has no pipes to the process that renders it")
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
                    raise _SilentError(why)
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
            raise _SilentError(self._ended()) from None

    def _read(self, handle: int, so_far: int) -> bytes:
        data = os.read(handle, 1 << 16)
        if not data:
            raise _SilentError(self._ended())
        if so_far + len(data) > self._most_bytes:
            raise _SilentError("gives too long an answer")
        return data

    def _ended(self) -> str:
        code = self._child.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended the process that rendered it ({how})"
