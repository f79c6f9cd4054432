"""The driver's side of remote calls: who awaits what.

Every call has an id, so replies may come in any order and a late one can never answer another call:
it meets a tombstone and is counted. No I/O and no clock here: channels deliver replies, callers
bring deadlines.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from attrs import define, field, frozen

from hardpoint.errors import CallTimeoutError, RemoteError


@frozen(kw_only=True)
class Call:
    """One call to every worker. ``deadline`` is monotonic seconds or None; ``reply_rank`` None
    means all values.
    """

    call_id: int
    generation: int
    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)
    reply_rank: int | None = None
    deadline: float | None = None

    @property
    def name(self) -> str:
        """The method as people know it."""
        method = self.method
        return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))


@frozen(kw_only=True)
class RemoteFailure:
    """An exception as it travels: its qualified type, text, traceback and, if it could be encoded,
    itself.
    """

    type_name: str
    message: str
    traceback: str
    exception: BaseException | None = None

    def raised_by(self, rank: int, method: str) -> RemoteError:
        """Build the error that the caller sees, with the original exception as ``__cause__``."""
        error = RemoteError(
            f"worker rank {rank} raised {self.type_name} in {method!r}: {self.message}\n"
            f"--- traceback on rank {rank} ---\n{self.traceback}",
            rank=rank,
            type_name=self.type_name,
            remote_traceback=self.traceback,
        )
        error.__cause__ = self.exception
        return error


@frozen(kw_only=True)
class Reply:
    """One rank's acknowledgement of one call: a value (None where it was not asked for one) or a
    failure.
    """

    call_id: int
    rank: int
    generation: int
    value: Any = None
    failure: RemoteFailure | None = None


@define(eq=False)
class Gather:
    """One call's answers on their way; ``future`` ends exactly once."""

    call: Call
    world_size: int
    future: Future[Any] = field(factory=Future)
    acknowledged: set[int] = field(factory=set)
    values: dict[int, Any] = field(factory=dict)

    def expire_in(self, seconds: float, table: CallTable) -> None:
        """Fail the future with CallTimeoutError unless it is done in ``seconds``."""
        timer = threading.Timer(seconds, table.expire, (self.call.call_id,))
        timer.daemon = True
        timer.start()
        self.future.add_done_callback(lambda _: timer.cancel())

    def take(self, reply: Reply) -> None:
        """Note one rank's answer; the first error, or the last answer, completes the future."""
        if reply.rank in self.acknowledged:
            return
        self.acknowledged.add(reply.rank)
        if reply.failure is not None:
            self.finish(error=reply.failure.raised_by(reply.rank, self.call.name))
            return
        self.values[reply.rank] = reply.value
        if len(self.values) == self.world_size:
            rank = self.call.reply_rank
            in_order = [self.values[index] for index in range(self.world_size)]
            self.finish(value=in_order if rank is None else in_order[rank])

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Complete the future, unless it was cancelled or is complete already."""
        try:
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)
        except InvalidStateError:
            return


class CallTable:
    """All calls that some rank has not yet acknowledged. Thread-safe; futures complete on the
    delivering thread.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Gather] = {}
        self.late_replies = 0

    def next_id(self) -> int:
        """Return an id never given before."""
        return next(self._ids)

    def open(self, call: Call, world_size: int) -> Gather:
        """Await ``world_size`` acknowledgements of ``call``."""
        gather = Gather(call, world_size)
        with self._lock:
            self._open[call.call_id] = gather
        return gather

    def forget(self, call_id: int) -> None:
        """Drop a call that was never sent."""
        with self._lock:
            self._open.pop(call_id, None)

    def deliver(self, reply: Reply) -> None:
        """Give one rank's reply to its call. Replies to finished, unknown or other-generation calls
        are counted only.
        """
        with self._lock:
            gather = self._open.get(reply.call_id)
            if gather is None or gather.call.generation != reply.generation:
                self.late_replies += 1
                return
            if gather.future.done():
                self.late_replies += 1
            if len(gather.acknowledged | {reply.rank}) == gather.world_size:
                del self._open[reply.call_id]
        gather.take(reply)

    def expire(self, call_id: int) -> None:
        """End a call by timeout; its entry stays until every rank has acknowledged, so that late
        replies are known.
        """
        with self._lock:
            gather = self._open.get(call_id)
        if gather is not None:
            missing = [rank for rank in range(gather.world_size) if rank not in gather.acknowledged]
            gather.finish(
                error=CallTimeoutError(
                    f"{gather.call.name!r} was not answered in time by ranks {missing}"
                )
            )

    def fail_all(self, error: BaseException) -> None:
        """End every open call with ``error`` (the executor failed or was shut down)."""
        with self._lock:
            gathers = list(self._open.values())
            self._open.clear()
        for gather in gathers:
            gather.finish(error=error)

    @property
    def pending(self) -> int:
        """How many calls are not acknowledged by every rank."""
        with self._lock:
            return len(self._open)
