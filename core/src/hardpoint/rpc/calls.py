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
from time import monotonic
from typing import TYPE_CHECKING, Any

from attrs import define, field

from hardpoint.errors import CallTimeoutError, EncodingError, ExecutorFailedError
from hardpoint.isolation import log_error, text_of
from hardpoint.rpc import codec
from hardpoint.rpc.failures import RemoteFailure

if TYPE_CHECKING:
    from hardpoint.rpc.claims import CallerClaims

_logger = logging.getLogger("hardpoint.executor")

__all__ = ["Call", "CallTable", "Gather", "PackedCall", "RemoteFailure", "Reply"]


@define(kw_only=True)
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
            queued=self.queued,
        )


@define(kw_only=True)
class PackedCall:
    """A call on its way; ``body`` unpacks to (method, args, kwargs)."""

    call_id: int
    generation: int
    name: str
    body: codec.Parcel
    reply_rank: int | None = None
    queued: bool = False
    """Whether its caller may take it back before it is begun (it does not wait for the call)."""


@define(kw_only=True)
class Reply:
    """One rank's acknowledgement of one call: a packed value (None where it was not asked for one)
    or a failure.
    """

    call_id: int
    rank: int
    generation: int
    value: codec.Parcel | None = None
    failure: RemoteFailure | None = None


class Gather:
    """One call's answers on their way; it ends exactly once.

    A caller that waits does so here or through a Receiver; ``future`` is made only for callers that
    do not, as making one costs more than the rest of a short call.
    """

    ended = False
    expired = False
    _begun = False
    _value: Any = None
    _error: BaseException | None = None
    _future: Future[Any] | None = None
    _waker: Callable[[], None] | None = None
    # On the class, as most calls never change them: making a Gather is on the hot path.

    def __init__(
        self,
        call: Call,
        world_size: int,
        claims: CallerClaims | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self.call = call
        self.generation = call.generation
        self.claims = claims
        self.world_size = world_size
        self.silent = self._wanted = (1 << world_size) - 1
        """Ranks that have not replied, a bit for each; guarded by the table's lock."""
        self._values: list[Any] = [None] * world_size
        self._lock = threading.Lock() if lock is None else lock

    @property
    def future(self) -> Future[Any]:
        """The future of this call; always the same."""
        with self._lock:
            future = self._future
            if future is None:
                claims, number = self.claims, self.call.call_id
                future = Future() if claims is None else claims.future(number, self.begin)
                self._future = future
                if self._begun:
                    self._set_running(future)
                ended = self.ended
            else:
                ended = False
        if ended:
            self._complete(future)
        return future

    @property
    def over(self) -> bool:
        """Whether the caller has its end: the call's own, or a cancelled future."""
        future = self._future
        return self.ended or (future is not None and future.done())

    def begin(self) -> bool:
        """Note that a worker starts on the call, from when it cannot be cancelled; False if it was
        cancelled.
        """
        with self._lock:
            future = self._future
            if self.ended or self._begun:
                return future is None or not future.cancelled()
            self._begun = True
            return future is None or self._set_running(future)

    def take(self, rank: int, parcel: codec.Parcel | None) -> None:
        """Use one rank's value; the last one ends the call.

        What the value's own code raises while it is rebuilt, be it SystemExit, ends it too.
        """
        values = self._values
        if parcel is not None:
            try:
                values[rank] = codec.unpack(parcel, "result", self.call.name)
            except BaseException as error:  # noqa: BLE001 - else nobody would end the call
                self.finish(error=self._unusable(rank, error))
                return
        with self._lock:
            last = self.counts(1 << rank)
        if last and self.awaited:
            self.tell()

    def counts(self, bit: int) -> bool:
        """Count one rank's answer as used, under the lock; return whether that ended the call."""
        self._wanted = wanted = self._wanted & ~bit
        if wanted or self.ended:
            return False
        asked = self.call.reply_rank
        self._value = self._values if asked is None else self._values[asked]
        self.ended = True
        return True

    @property
    def awaited(self) -> bool:
        """Whether somebody is to be told of the end."""
        return self._future is not None or self._waker is not None

    def fail(self, rank: int, failure: RemoteFailure) -> BaseException:
        """End the call by the error that a rank reported; return that as it is raised here."""
        try:
            error: BaseException = failure.raised_by(rank, self.call.name)
        except BaseException as raised:  # noqa: BLE001 - as in take
            error = self._unusable(rank, raised)
        self.finish(error=error)
        return error

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the call, unless it has ended or its future was cancelled; wake who waits.

        The future's callbacks run here, on the thread of others; what they raise is logged.
        """
        with self._lock:
            if self.ended:
                return
            self._value, self._error = value, error
            self.ended = True
        self.tell()

    def tell(self) -> None:
        """Tell those who wait; later ones find the call ended."""
        with self._lock:
            future, waker = self._future, self._waker
        if future is not None:
            self._complete(future)
        if waker is not None:
            waker()

    def wake_by(self, waker: Callable[[], None]) -> bool:
        """Have ``waker()`` called when the call ends; return True, without that, if it has ended.

        One waits at a time: the last waker given is called.
        """
        with self._lock:
            self._waker = waker
            return self.ended

    def wait(self, deadline: float | None) -> bool:
        """Wait until the call has ended or ``deadline`` (monotonic s) has passed; return whether it
        has ended. Somebody else delivers the replies.
        """
        if self.ended:
            return True
        done = threading.Lock()
        done.acquire()
        if not self.wake_by(done.release):
            done.acquire(timeout=-1 if deadline is None else max(0.0, deadline - monotonic()))
        return self.ended

    def result(self) -> Any:
        """Return the value of a call that has ended, or raise its error."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self = None  # type: ignore[assignment]  # noqa: PLW0642 - no cycle with its traceback
        return self._value

    def _complete(self, future: Future[Any]) -> None:
        """Give ``future`` what the call ended with."""
        with self._lock:
            if not self._begun:
                self._begun = True
                if not self._set_running(future):
                    return
        try:
            if self._error is None:
                future.set_result(self._value)
            else:
                future.set_exception(self._error)
        except InvalidStateError:  # a caller completed its own future: that is its affair
            return
        except BaseException as raised:
            main = threading.current_thread() is threading.main_thread()
            if main and isinstance(raised, KeyboardInterrupt):
                raise  # Ctrl-C, of which only the main thread hears
            what = f"a callback of {self.call.name!r} raised, and those after it were not called"
            log_error(_logger, what, raised)

    @staticmethod
    def _set_running(future: Future[Any]) -> bool:
        """Mark a future as running; False if it was cancelled."""
        try:
            done = future.done() and not future.cancelled()
            return done or future.set_running_or_notify_cancel()
        except RuntimeError:  # as above, in this very moment
            return True

    def _unusable(self, rank: int, error: BaseException) -> EncodingError:
        """Return the error of an answer whose own code failed here."""
        if isinstance(error, EncodingError):
            return error
        wrong = EncodingError(
            f"the answer of rank {rank} to {self.call.name!r} cannot be used here: its own code "
            f"raised {type(error).__name__}: {text_of(error)}"
        )
        wrong.__cause__ = error
        return wrong


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
        with self._lock:
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
        told = False
        with self._lock:
            gather = self._open.get(call_id)
            bit = 1 << rank if rank >= 0 else 0
            if gather is None or not gather.silent & bit or gather.generation != generation:
                self.late_replies += 1
                return
            gather.silent ^= bit
            if gather.expired:
                self.late_replies += 1
            if not gather.silent:
                del self._open[call_id]
            if value is None and failure is None:
                told = gather.counts(bit)
        if value is not None:
            gather.take(rank, value)
        elif failure is not None:
            error = gather.fail(rank, failure)
            if self.erred is not None:
                self.erred(rank, call_id, error)
        elif told and gather.awaited:
            gather.tell()

    def missing(self, call_id: int) -> list[int]:
        """Return the ranks that have not acknowledged a call; none for a call that is over."""
        with self._lock:
            gather = self._open.get(call_id)
            if gather is None:
                return []
            return _ranks(gather.silent)

    def expire(self, call_id: int) -> None:
        """End a call by timeout; its entry stays until every rank has acknowledged, so that late
        replies are known.
        """
        with self._lock:
            gather = self._open.get(call_id)
            if gather is not None:
                gather.expired = not gather.over
                missing = _ranks(gather.silent)
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
        return len(self._open)

    @property
    def calls(self) -> Mapping[int, Gather]:
        """Those calls, by id; changes while it is looked at."""
        return self._open


def _ranks(bits: int) -> list[int]:
    """Return the numbers of the bits that are set."""
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
