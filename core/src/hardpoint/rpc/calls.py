"""The driver's side of remote calls: who awaits what.

Every call has an id, so replies may come in any order and a late one can never answer another call:
it meets a tombstone and is counted. No I/O and no clock here: channels deliver replies, callers
bring deadlines.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from attrs import define, field, frozen

from hardpoint.errors import CallTimeoutError, EncodingError, ExecutorFailedError
from hardpoint.isolation import log_error, text_of
from hardpoint.rpc import codec
from hardpoint.rpc.failures import RemoteFailure

_logger = logging.getLogger("hardpoint.executor")

__all__ = ["Call", "CallTable", "Gather", "PackedCall", "RemoteFailure", "Reply"]


@frozen(kw_only=True)
class Call:
    """One call to every worker. ``timeout`` is seconds and ``deadline`` the monotonic second at
    which it ends, or None; ``reply_rank`` None means all values.
    """

    call_id: int
    generation: int
    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)
    reply_rank: int | None = None
    timeout: float | None = None
    deadline: float | None = None

    @property
    def name(self) -> str:
        """The method as people know it."""
        method = self.method
        return method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))

    def pack(self) -> PackedCall:
        """Return the call as it travels within a process; raise EncodingError for what cannot."""
        name = self.name
        return PackedCall(
            call_id=self.call_id,
            generation=self.generation,
            name=name,
            body=codec.pack_arguments(self.method, self.args, self.kwargs, name),
            reply_rank=self.reply_rank,
        )


@frozen(kw_only=True)
class PackedCall:
    """A call on its way; ``body`` unpacks to (method, args, kwargs)."""

    call_id: int
    generation: int
    name: str
    body: codec.Parcel
    reply_rank: int | None = None


@frozen(kw_only=True)
class Reply:
    """One rank's acknowledgement of one call: a packed value (None where it was not asked for one)
    or a failure.
    """

    call_id: int
    rank: int
    generation: int
    value: codec.Parcel | None = None
    failure: RemoteFailure | None = None


@define(eq=False)
class Gather:
    """One call's answers on their way; ``future`` ends exactly once."""

    call: Call
    world_size: int
    future: Future[Any] = field(factory=Future)
    acknowledged: set[int] = field(factory=set)
    """Ranks that have replied; guarded by the table's lock."""
    values: dict[int, Any] = field(factory=dict)
    expired: bool = False
    _ended: bool = False
    _begun: bool = False
    _lock: threading.Lock = field(factory=threading.Lock)

    def begin(self) -> bool:
        """Note that a worker starts on the call, from when it cannot be cancelled; False if it was
        cancelled.
        """
        with self._lock:
            if self._ended or self._begun:
                return not self.future.cancelled()
            self._begun = True
            return self._set_running()

    def _set_running(self) -> bool:
        """Mark the future as running; False if it was cancelled."""
        try:
            done = self.future.done() and not self.future.cancelled()
            return done or self.future.set_running_or_notify_cancel()
        except RuntimeError:  # as below, in this very moment
            return True

    def take(self, reply: Reply) -> None:
        """Use one rank's answer; the first error, or the last answer, completes the future.

        What the answer's own code raises while it is rebuilt, be it SystemExit, is the error.
        """
        name = self.call.name
        try:
            if reply.failure is not None:
                self.finish(error=reply.failure.raised_by(reply.rank, name))
                return
            parcel = reply.value
            value = None if parcel is None else codec.unpack(parcel, f"result of {name!r}")
        except EncodingError as error:
            self.finish(error=error)
            return
        except BaseException as error:  # noqa: BLE001 - else nobody would end the call
            wrong = EncodingError(
                f"the answer of rank {reply.rank} to {name!r} cannot be used here: its own code "
                f"raised {type(error).__name__}: {text_of(error)}"
            )
            wrong.__cause__ = error
            self.finish(error=wrong)
            return
        with self._lock:
            self.values[reply.rank] = value
            complete = len(self.values) == self.world_size
        if complete:
            rank = self.call.reply_rank
            if rank is None:
                self.finish(value=[self.values[index] for index in range(self.world_size)])
            else:
                self.finish(value=self.values[rank])

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Complete the future, unless it was cancelled or is complete already.

        Its callbacks run here, on the thread of others; what they raise is logged.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if not self._begun:
                self._begun = True
                if not self._set_running():
                    return
        try:
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)
        except InvalidStateError:  # a caller completed its own future: that is its affair
            return
        except BaseException as raised:
            main = threading.current_thread() is threading.main_thread()
            if main and isinstance(raised, KeyboardInterrupt):
                raise  # Ctrl-C, of which only the main thread hears
            what = f"a callback of {self.call.name!r} raised, and those after it were not called"
            log_error(_logger, what, raised)


class CallTable:
    """All calls that some rank has not yet acknowledged. Thread-safe; futures complete on the
    delivering thread.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Gather] = {}
        self._closed: BaseException | None = None
        self.late_replies = 0
        """Replies that answered nobody: late, doubled, or of another generation."""

    def next_id(self) -> int:
        """Return an id never given before."""
        return next(self._ids)

    def open(self, call: Call, world_size: int) -> Gather:
        """Await ``world_size`` acknowledgements of ``call``; raise ExecutorFailedError once all
        calls were failed.
        """
        gather = Gather(call, world_size)
        with self._lock:
            if self._closed is not None:
                raise ExecutorFailedError(
                    f"{call.name!r} was not sent: {self._closed}"
                ) from self._closed
            self._open[call.call_id] = gather
        return gather

    def forget(self, call_id: int) -> None:
        """Drop a call that was never sent."""
        with self._lock:
            self._open.pop(call_id, None)

    def begin(self, call_id: int) -> bool:
        """Note that a worker starts on a call; False, and the call is dropped, if nobody wants it
        any more: it was cancelled, or failed with all others.
        """
        with self._lock:
            gather = self._open.get(call_id)
        if gather is not None and gather.begin():
            return True
        self.forget(call_id)
        return False

    def deliver(self, reply: Reply) -> None:
        """Give one rank's reply to its call. Replies to finished, unknown or other-generation calls
        are counted only.
        """
        with self._lock:
            gather = self._open.get(reply.call_id)
            if gather is None or gather.call.generation != reply.generation:
                self.late_replies += 1
                return
            known = gather.acknowledged
            if reply.rank in known or not 0 <= reply.rank < gather.world_size:
                self.late_replies += 1
                return
            if gather.expired:
                self.late_replies += 1
            known.add(reply.rank)
            if len(known) == gather.world_size:
                del self._open[reply.call_id]
        gather.take(reply)

    def expire(self, call_id: int) -> None:
        """End a call by timeout; its entry stays until every rank has acknowledged, so that late
        replies are known.
        """
        with self._lock:
            gather = self._open.get(call_id)
            if gather is not None:
                gather.expired = not gather.future.done()
                missing = sorted(set(range(gather.world_size)) - gather.acknowledged)
        if gather is not None:
            call = gather.call
            within = "in time" if call.timeout is None else f"within {call.timeout:g} s"
            gather.finish(
                error=CallTimeoutError(
                    f"{call.name!r} was not answered {within} by ranks {missing}; it may still "
                    f"run there, its late answer will be dropped"
                )
            )

    def fail_all(self, error: BaseException) -> None:
        """End every open call with ``error`` and open no more (the executor failed or was shut
        down).
        """
        with self._lock:
            self._closed = self._closed or error
            gathers = list(self._open.values())
            self._open.clear()
        for gather in gathers:
            gather.finish(error=error)

    @property
    def pending(self) -> int:
        """How many calls are not acknowledged by every rank."""
        with self._lock:
            return len(self._open)
