"""One request's answers while they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from hardpoint_engine.engine_thread import Call
from hardpoint_engine.outputs import RequestOutput


class ResultStream(Iterator[RequestOutput]):
    """Iterates over the states of one request, each with all that was generated so far.

    The last is ``finished``. What arrived since the last ``next()`` comes as one. Raises what the
    request failed by. Leaving it early (``close``, ``with``, dropping it, or an interrupt while it
    waits) aborts the request.
    """

    def __init__(
        self, call: Call, wait: Callable[[Call], None], drop: Callable[[str], None]
    ) -> None:
        self._call = call
        (self._generation,) = call.generations
        self._wait = wait
        self._drop = drop
        self._ended = False

    @property
    def request_id(self) -> str:
        """The id to abort it by."""
        return self._generation.request_id

    def __next__(self) -> RequestOutput:
        if self._ended:
            raise StopIteration
        try:
            self._wait(self._call)
            state = self._generation.snapshot()
        except Exception:
            raise
        except BaseException:
            self.close()
            raise
        self._ended = state.finished
        if state.error is not None:
            raise state.error
        return state

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
