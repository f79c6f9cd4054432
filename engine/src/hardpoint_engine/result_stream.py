"""One request's answers while they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from hardpoint_engine.completion import Generation
from hardpoint_engine.outputs import RequestOutput


class ResultStream(Iterator[RequestOutput]):
    """Iterates over the states of one request, each with all that was generated so far.

    The last is ``finished``. What arrived since the last ``next()`` comes as one. Raises what the
    request failed by. Leaving it early (``close``, ``with``, or dropping it) aborts the request.
    """

    def __init__(
        self,
        generation: Generation,
        step: Callable[[], None],
        drop: Callable[[str], None],
        lock: AbstractContextManager[object],
    ) -> None:
        self._generation = generation
        self._step = step
        self._drop = drop
        self._lock = lock
        self._ended = False

    @property
    def request_id(self) -> str:
        """The id to abort it by."""
        return self._generation.request_id

    def __next__(self) -> RequestOutput:
        generation = self._generation
        while not self._ended and not generation.changed:
            self._step()
        if self._ended:
            raise StopIteration
        with self._lock:
            self._ended = generation.finished
            if generation.error is not None:
                raise generation.error
            return generation.snapshot()

    def close(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        self._ended = True
        if not self._generation.finished:
            self._drop(self._generation.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()
