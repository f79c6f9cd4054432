"""One call's answers on their way, and who waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from time import monotonic
from typing import TYPE_CHECKING, Any

from hardpoint.errors import EncodingError
from hardpoint.isolation import log_error, text_of
from hardpoint.rpc import codec

if TYPE_CHECKING:
    from hardpoint.rpc.calls import Call
    from hardpoint.rpc.claims import CallerClaims
    from hardpoint.rpc.failures import RemoteFailure

_loads, _loads_plain, _PICKLED = codec.loads, codec.loads_plain, codec.PICKLED
_logger = logging.getLogger("hardpoint.executor")


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
    _wakers: tuple[Callable[[], None], ...] = ()
    held: BaseException | None = None
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
        self.silent = set(range(world_size))
        """Ranks that have not replied. It and ``used`` are changed by single steps only, each
        whole by itself, so that most answers need no lock.
        """
        self.values: list[Any] = [None] * world_size
        self.used: list[int] = []  # ranks whose answers are in it
        self._lock = threading.Lock() if lock is None else lock

    @property
    def future(self) -> Future[Any]:
        """The future of this call; always the same."""
        with self._lock:
            future = self._future
            if future is None:
                claims = self.claims
                future = Future() if claims is None else claims.future(self)
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
        values = self.values
        if parcel is not None:
            try:
                if type(parcel) is codec.Carried:
                    values[rank] = parcel.value
                elif type(parcel) is bytes:
                    plain = parcel[0] != _PICKLED
                    values[rank] = _loads_plain(parcel) if plain else _loads(parcel)
                else:
                    values[rank] = codec.unpack(parcel, "result", self.call.name)
            except BaseException as error:  # noqa: BLE001 - else nobody would end the call
                if type(parcel) is bytes:
                    error = codec.unusable("result", self.call.name, error)
                self.finish(error=self._unusable(rank, error))
                return
        used = self.used
        used.append(rank)
        if len(used) == self.world_size:
            asked = self.call.reply_rank
            self.finish(values if asked is None else values[asked])

    def fail(self, rank: int, failure: RemoteFailure) -> BaseException:
        """End the call by the error that a rank reported; return that as it is raised here.

        An error that only follows from what befell another rank is held back until all have
        answered, one of them with an error of its own, or the executor fails by that rank's end.
        """
        try:
            error: BaseException = failure.raised_by(rank, self.call.name)
        except BaseException as raised:  # noqa: BLE001 - as in take
            error = self._unusable(rank, raised)
        if failure.consequence:
            self.held = self.held or error
            self.settle()
        else:
            self.finish(error=error)
        return error

    def settle(self, *, late: bool = False) -> bool:
        """End the call by an error that was held back, if there is one and all ranks have answered,
        or it is too ``late`` for those; return whether there is one.
        """
        if self.held is not None and (late or not self.silent):
            self.finish(error=self.held)
        return self.held is not None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the call, unless it has ended or its future was cancelled; wake who waits.

        The future's callbacks run here, on the thread of others; what they raise is logged.
        """
        with self._lock:
            if self.ended:
                return
            self._value, self._error = value, error
            self.ended = True
            future, wakers = self._future, self._wakers
        if future is not None:
            self._complete(future)
        for waker in wakers:
            waker()

    def wake_by(self, waker: Callable[[], None]) -> bool:
        """Have ``waker()`` called when the call ends; return True, without that, if it has."""
        with self._lock:
            if waker not in self._wakers:
                self._wakers += (waker,)
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
