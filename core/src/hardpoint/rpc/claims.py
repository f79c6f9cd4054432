"""Who comes first: workers that begin a queued call, or the caller that takes it back.

A call that was cancelled must run on no worker, one that runs on some must run on all; and workers
in processes of their own begin without asking anyone. Both sides therefore write first and look
then, with a fence between: at least one sees the other. A worker that finds its call being taken
back waits for the driver's word, which is a matter of microseconds. Where there is no fence
(:func:`is_ordered`), nothing that was sent is taken back.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from time import monotonic
from typing import TYPE_CHECKING, Any

from hardpoint.rpc.shared_memory.memory import PAGE, Fence, Memory, is_ordered

if TYPE_CHECKING:
    from hardpoint.rpc.gather import Gather

SLOTS = 256
"""Calls that can be told apart at once: a call has the slot of its id's last digits."""

_ASKED, _TAKEN, _KEPT = 1, 2, 3
_BITS, _STATE = 2, 3
"""A state is a call's id and one of these, a rank's word an id and whether the rank is past it."""


def _size(world_size: int) -> int:
    """Return the bytes of the states, and of what each rank has begun last, in whole pages."""
    return -(-8 * SLOTS * (1 + world_size) // PAGE) * PAGE


class CallerClaims:
    """The driver's side: takes calls back that no worker has begun."""

    def __init__(self, world_size: int) -> None:
        self._memory = Memory.create(_size(world_size))
        self._world_size = world_size
        self._ordered = is_ordered()
        self._fence = Fence()
        self._lock = threading.Lock()
        self.wait: Callable[[Gather, float | None], bool] | None = None
        """How whoever asks a future for its result waits: :meth:`Receiver.wait`, by which the reply
        wakes nobody else. None: as for any future.
        """

    @property
    def fd(self) -> int:
        """The descriptor that every worker attaches with."""
        return self._memory.fd

    def take_back(self, call_id: int) -> bool:
        """Have no worker begin the call any more; False if one may have. Any thread."""
        slot = call_id % SLOTS
        with self._lock:
            if self._memory.fd < 0 or not self._ordered:
                return False
            words = self._memory.words
            last, state = words[slot] >> _BITS, words[slot] & _STATE
            if last == call_id:
                return state == _TAKEN
            if state == _TAKEN and not self._passed(last):
                return False  # the slot is another call's still
            words[slot] = call_id << _BITS | _ASKED
            self._fence()
            taken = not self.begun(call_id)
            words[slot] = call_id << _BITS | (_TAKEN if taken else _KEPT)
            return taken

    def future(self, gather: Gather) -> ClaimedFuture:
        """Return the future of a call."""
        return ClaimedFuture(self, gather)

    def begun(self, call_id: int) -> bool:
        """Whether some worker has begun the call (or skipped it)."""
        if self._memory.fd < 0:
            return False
        words, slot, entered = self._memory.words, call_id % SLOTS, call_id << 1
        return any(words[(1 + rank) * SLOTS + slot] >= entered for rank in range(self._world_size))

    def _passed(self, call_id: int) -> bool:
        """Whether every worker has come to the call, seen that it was taken, and skipped it."""
        words, slot, left = self._memory.words, call_id % SLOTS, call_id << 1 | 1
        return all(words[(1 + rank) * SLOTS + slot] >= left for rank in range(self._world_size))

    def close(self) -> None:
        """Give the memory back; no call can be taken back then. Idempotent."""
        with self._lock:
            self._memory.close()


class Unclaimed(CallerClaims):
    """The driver's side where some worker shares no memory with it: a call that was sent is begun,
    and nothing is taken back.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self.wait = None

    @property
    def fd(self) -> int:
        """No descriptor: -1."""
        return -1

    def take_back(self, call_id: int) -> bool:
        """Return False."""
        return False

    def begun(self, call_id: int) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing."""


class ClaimedFuture(Future[Any]):
    """The future of a call whose workers do not ask before they begin it."""

    def __init__(self, claims: CallerClaims, gather: Gather) -> None:
        super().__init__()
        self._claims = claims
        self._gather = weakref.ref(gather)  # it holds this one; open calls hold it
        self._call_id = gather.call.call_id

    def cancel(self) -> bool:
        """Cancel the call, unless a worker has begun it."""
        gather = self._gather()
        if gather is not None and not self.done() and not self._claims.take_back(self._call_id):
            gather.begin()
        cancelled = super().cancel()
        if gather is not None and cancelled:
            gather.finish(error=CancelledError())  # whoever waits for it waits no longer
        return cancelled

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise, as any future."""
        return super().result(self._waited(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what it raised, or None, as any future."""
        return super().exception(self._waited(timeout))

    def _waited(self, timeout: float | None) -> float | None:
        """Wait at the channel itself; return for how long to wait still."""
        wait, gather = self._claims.wait, self._gather()
        if wait is None or gather is None or self.done():
            return timeout
        deadline = None if timeout is None else monotonic() + timeout
        wait(gather, deadline)
        return None if deadline is None else max(0.0, deadline - monotonic())

    def running(self) -> bool:
        """Whether a worker has begun the call and not all have ended it."""
        gather = self._gather()
        if gather is not None and not self.done() and self._claims.begun(self._call_id):
            gather.begin()
        return super().running()


class WorkerClaims:
    """One worker's side: begins calls that were not taken back. Belongs to the serving thread."""

    def __init__(self, fd: int, world_size: int, rank: int) -> None:
        self._memory = Memory.attach(fd, _size(world_size))
        self._words = self._memory.words
        self._own = (1 + rank) * SLOTS
        self._fence = Fence()

    def begin(self, call_id: int) -> bool:
        """Claim the call for the workers; False if the caller took it back: it runs nowhere."""
        words, slot = self._words, call_id % SLOTS
        words[self._own + slot] = call_id << 1
        self._fence()
        asked = call_id << _BITS | _ASKED
        while (found := words[slot]) == asked:
            os.sched_yield()
        # The slot of a call that was taken is not another's before this worker has passed it; so if
        # it is another's by now, this call was kept.
        kept = found != call_id << _BITS | _TAKEN
        words[self._own + slot] = call_id << 1 | 1  # only now may the slot be another call's
        return kept

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._memory.close()
