"""The driver's side of remote calls: who awaits what.

Every call has an id, so replies may come in any order and a late one can never answer another call:
it meets a tombstone and is counted. No I/O and no clock here: channels deliver replies, callers
bring deadlines.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field

from hardpoint.errors import CallTimeoutError, ExecutorFailedError
from hardpoint.rpc import codec
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.gather import Gather

if TYPE_CHECKING:
    from hardpoint.rpc.claims import CallerClaims
    from hardpoint.rpc.encoding import Codec

__all__ = ["Call", "CallTable", "Gather", "PackedCall", "RemoteFailure", "Reply"]


@define
class Call:
    """One call to every worker; never changed (to freeze it would double the cost of making it).

    ``timeout`` is seconds and ``deadline`` the monotonic second at
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
    queued: bool = False

    @property
    def name(self) -> str:
        """The method as people know it; never what it was given."""
        method = self.method
        if isinstance(method, str):
            return method
        while isinstance(method, partial):
            method = method.func
        name: str = getattr(method, "__qualname__", None) or type(method).__qualname__
        return name

    def pack(self, by: Codec | None = None) -> PackedCall:
        """Return the call as it travels within a process; raise EncodingError for what cannot.

        ``by`` is the executor's codec; without it, that of ``rpc.pickle = "local"``.
        """
        name = self.name
        if by is None:
            body = codec.pack_arguments(self.method, self.args, self.kwargs, name)
        else:
            body = by.pack_call(self)
        return PackedCall(self.call_id, self.generation, name, body, self.reply_rank, self.queued)


@define
class PackedCall:
    """A call on its way; ``body`` unpacks to (method, args, kwargs), or to the args alone, if it
    is plain: then the name is the method.
    """

    call_id: int
    generation: int
    name: str
    body: codec.Parcel
    reply_rank: int | None = None
    queued: bool = False
    """Whether its caller may take it back before it is begun (it does not wait for the call)."""

    def unpack(self) -> tuple[str | Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        """Return method, args and kwargs; raise EncodingError."""
        body = self.body
        if type(body) is codec.Carried:
            carried: tuple[str, Sequence[Any], Mapping[str, Any]] = body.value
            return carried
        found = codec.unpack(body, "arguments", self.name)
        if type(body) is bytes and body[0] != codec.PICKLED:
            return self.name, found, {}
        method, args, kwargs = found
        return method, args, kwargs


@define
class Reply:
    """One rank's acknowledgement of one call: a packed value (None where it was not asked for one)
    or a failure.

    Between a worker's host and its channel's end, ``value`` may be the result itself, not packed
    yet; then ``of`` is the name of the call.
    """

    call_id: int
    rank: int
    generation: int
    value: Any = None
    failure: RemoteFailure | None = None
    of: str = ""


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
        self.erred: Callable[[int, int, BaseException], None] | None = None
        """Called as (rank, call id, error) for each error that a rank reports, on the delivering
        thread, after the caller was told; set by whoever supervises the workers.
        """
        self.claims: CallerClaims | None = None
        """By what calls are taken back of workers that begin them unasked; set by the executor."""

    def next_id(self) -> int:
        """Return an id never given before."""
        return next(self._ids)

    def open(self, call: Call, world_size: int) -> Gather:
        """Await ``world_size`` acknowledgements of ``call``; raise ExecutorFailedError once all
        calls were failed.
        """
        call_id = call.call_id
        gather = self._open[call_id] = Gather(call, world_size, self.claims, self._lock)
        # Put in first, looked at then: a failure of all calls does the opposite, so it is seen
        # here, or it sees this call.
        closed = self._closed
        if closed is not None:
            self.forget(call_id)
            raise ExecutorFailedError(f"{call.name!r} was not sent: {closed}") from closed
        return gather

    def forget(self, call_id: int) -> None:
        """Drop a call that was never sent."""
        with self._lock:
            self._open.pop(call_id, None)

    def begin(self, call_id: int) -> bool:
        """Note that a worker starts on a call; False, and the call is dropped, if nobody wants it
        any more: it was cancelled, or failed with all others.
        """
        gather = self._open.get(call_id)
        if gather is not None and gather.begin():
            return True
        self.forget(call_id)
        return False

    def deliver(self, reply: Reply) -> None:
        """Give one rank's reply to its call, as :meth:`acknowledge`."""
        self.acknowledge(reply.call_id, reply.rank, reply.generation, reply.value, reply.failure)

    def acknowledge(
        self,
        call_id: int,
        rank: int,
        generation: int,
        value: codec.Parcel | None = None,
        failure: RemoteFailure | None = None,
    ) -> None:
        """Give one rank's answer to its call. Those to finished, unknown or other-generation calls
        are counted only.
        """
        gather = self._open.get(call_id)
        if gather is None or gather.generation != generation:
            self._late()
            return
        try:
            gather.silent.remove(rank)
        except KeyError:  # doubled, or of no rank
            self._late()
            return
        if not gather.silent:
            self._open.pop(call_id, None)
        if gather.expired:
            self._late()
        if failure is None:
            gather.take(rank, value)
        else:
            error = gather.fail(rank, failure)
            if self.erred is not None:
                self.erred(rank, call_id, error)
        if gather.held is not None:
            gather.settle()

    def _late(self) -> None:
        with self._lock:
            self.late_replies += 1

    def missing(self, call_id: int) -> list[int]:
        """Return the ranks that have not acknowledged a call; none for a call that is over."""
        with self._lock:
            gather = self._open.get(call_id)
            if gather is None:
                return []
            return sorted(gather.silent)

    def expire(self, call_id: int) -> None:
        """End a call by timeout; its entry stays until every rank has acknowledged, so that late
        replies are known.
        """
        with self._lock:
            gather = self._open.get(call_id)
            if gather is not None:
                gather.expired = not gather.over
                missing = sorted(gather.silent)
        if gather is not None and not gather.settle(late=True):
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
        down). What is queued and was begun nowhere will run nowhere.
        """
        with self._lock:
            self._closed = self._closed or error
            gathers = list(self._open.values())
            self._open.clear()
        for gather in gathers:
            if self.claims is not None and gather.call.queued:
                self.claims.take_back(gather.call.call_id)
            gather.finish(error=error)

    @property
    def pending(self) -> int:
        """How many calls are not acknowledged by every rank."""
        return len(self._open)

    @property
    def calls(self) -> Mapping[int, Gather]:
        """Those calls, by id; changes while it is looked at."""
        return self._open
