"""Feeds a running engine from the file of prompts, a window at a time, and keeps what comes out.

Driver side, on the caller's thread. Memory holds the window and a few bytes for each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from attrs import define
from hardpoint.errors import (
    ExecutorFailedError,
    HardpointError,
    InvalidRequestError,
    LifecycleError,
)

from hardpoint_engine.batch.prompt_file import BatchLine, BatchPrompt, PromptFile
from hardpoint_engine.batch.result_file import ResultFile
from hardpoint_engine.completion import Generation
from hardpoint_engine.conversations import ChatOptions
from hardpoint_engine.engine_thread import Call
from hardpoint_engine.front import Front
from hardpoint_engine.outputs import RequestOutput
from hardpoint_engine.prompts import PromptTokens
from hardpoint_engine.text.chat_template import ChatTemplateError

WINDOW_STEPS = 2
"""Requests in the engine at once, by those that may run at once: the next are there in time."""
TRIES = 2
"""How often a line is computed when the step that has it fails: the fault may be a neighbour's."""

Show = Callable[[RequestOutput, BatchPrompt], Mapping[str, Any]]


class _LineCall(Call):
    """A line's request; it is computed without anybody waiting, and comes back when it ended."""

    def __init__(self, generations: list[Generation], ended: SimpleQueue[_LineCall]) -> None:
        super().__init__(generations, eager=True)
        self.failure: Exception | None = None
        self._ended = ended

    def ring(self, error: Exception | None = None) -> None:
        self.failure = self.failure or error
        self._ended.put(self)


class _NoLineError(Exception):
    """No text at all can become a conversation: ``cause`` ends the run, and blames no line."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@define(eq=False)
class _Open:
    """A line that the engine has."""

    line: BatchLine
    prompt: BatchPrompt
    tries: int


class BatchRun:
    """One run over the lines that have no result yet.

    ``conversation`` are the options of conversations for prompts that are texts, None to
    continue them as they are. ``show`` makes plain data of a result. ``told`` is called after each
    line with the number of tokens that it gave.
    """

    def __init__(
        self,
        front: Front,
        prompts: PromptFile,
        results: ResultFile,
        *,
        conversation: ChatOptions | None,
        show: Show,
        told: Callable[[int], None],
    ) -> None:
        self._front = front
        self._prompts = prompts
        self._results = results
        self._conversation = conversation
        self._show = show
        self._told = told
        self._ended: SimpleQueue[_LineCall] = SimpleQueue()
        self._open: dict[int, _Open] = {}
        self.window = max(1, front.core.scheduler.limits.max_num_seqs) * WINDOW_STEPS

    def run(self) -> None:
        """Answer every line. Raises what ends the engine; what was written stays."""
        lines = (line for line in self._prompts if not self._results.has(line))
        more = True
        while more or self._open:
            while more and len(self._open) < self.window:
                more = self._feed(lines)
                self._collect(wait=False)
            if self._open:
                self._collect(wait=True)

    def _feed(self, lines: Iterator[BatchLine]) -> bool:
        """Queue the next line; False if there is none."""
        line = next(lines, None)
        if line is None:
            return False
        self._begin(line, None, 1)
        return True

    def _begin(self, line: BatchLine, prompt: BatchPrompt | None, tries: int) -> None:
        """Read and submit a line; whatever it makes raise is its own error, and no engine's end."""
        try:
            self._submit(line, prompt or self._prompts.read(line), tries)
        except _NoLineError as error:
            raise error.cause from None
        except (ExecutorFailedError, LifecycleError):
            raise
        except Exception as error:  # of ours, or of a plugin
            if not self._front.core.alive:
                raise
            self._fail(line, error)

    def _submit(self, line: BatchLine, prompt: BatchPrompt, tries: int) -> None:
        tokens = self._tokens(prompt)
        call = self._front.submit(
            [tokens], [prompt.sampling], [], lambda made: _LineCall(made, self._ended)
        )
        self._open[id(call)] = _Open(line, prompt, tries)

    def _tokens(self, prompt: BatchPrompt) -> PromptTokens:
        messages = prompt.messages
        if messages is None and self._conversation is not None and isinstance(prompt.prompt, str):
            messages = [{"role": "user", "content": prompt.prompt}]
        if messages is None:
            return self._front.tokens([prompt.prompt or ""])[0]
        options: ChatOptions = {**(self._conversation or {})}
        if prompt.messages is not None:
            options.pop("system", None)  # they may have their own
        try:
            return self._front.chat_tokens(messages, options, one=True)[0]
        except ChatTemplateError as error:
            own = options.get("chat_template")
            absent = own is None and self._front.tokenizer.chat_template is None
            if absent and prompt.messages is None:
                raise _NoLineError(error) from None
            raise
        except OSError as error:  # the process that renders cannot be started
            raise _NoLineError(error) from None

    def _collect(self, *, wait: bool) -> None:
        """Write the results that are there; ``wait`` for one at least."""
        while True:
            try:
                call = self._ended.get(block=wait)
            except Empty:
                return
            wait = False
            self._take(call)

    def _take(self, call: _LineCall) -> None:
        mine = self._open.pop(id(call), None)
        if mine is None:
            return
        (generation,) = call.generations
        error = call.failure or generation.error
        if not generation.finished:
            self._front.thread.abort([generation.request_id])
        if error is None:
            result = generation.snapshot()
            entry = {"id": self._prompts.id_of(mine.line), **self._show(result, mine.prompt)}
            self._results.write(mine.line, entry)
            self._told(sum(len(answer.token_ids) for answer in result.outputs))
            return
        if call.failure is not None or not self._front.core.alive:
            raise error
        if mine.tries < TRIES and not isinstance(error, InvalidRequestError):
            self._begin(mine.line, mine.prompt, mine.tries + 1)
        else:
            self._fail(mine.line, error)

    def _fail(self, line: BatchLine, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, HardpointError) else error
        entry = {"type": type(cause).__name__, "message": str(cause)}
        self._results.write(line, {"id": self._prompts.id_of(line), "error": entry})
        self._told(0)
