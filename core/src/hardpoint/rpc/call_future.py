"""The future of a call whose caller, as a rule, asks it for nothing but the result."""

from __future__ import annotations

import weakref
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.rpc.gather import Gather


class CallFuture(Future[Any]):
    """A future that becomes one when it is asked for more than its result without a time limit: to
    be one, and to be waited for as one, costs more than the rest of a short call.
    """

    def __init__(self, gather: Gather) -> None:  # that of a future comes when it is wanted
        self._gather: Gather | None = gather

    def become(self) -> None:
        """Be a future in all. Called by the gather, once."""
        if self._gather is not None:
            super().__init__()
            self._call = weakref.ref(self._gather)  # it holds this one from now on
            self._gather = None

    def __getattr__(self, name: str) -> Any:
        """Become a future, as somebody asks for what only that has."""
        if (gather := self.__dict__.get("_gather")) is not None:
            gather.complete_by(self)
        return object.__getattribute__(self, name)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise, as any future."""
        gather = self._gather
        if gather is None or timeout is not None:
            return super().result(timeout)
        gather.wait(None)
        return gather.result()

    def cancel(self) -> bool:
        """Cancel the call, unless the worker has begun it."""
        cancelled = super().cancel()
        if cancelled and (gather := self._call()) is not None:
            gather.finish(error=CancelledError())  # whoever waits for it waits no longer
        return cancelled
