"""One driver's end of several: some workers by shared memory, others by the network.

All workers get all calls in one order. A call is sent by all ends or by none: first every end that
can say so beforehand has room for it, then the one that cannot takes it, then the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from hardpoint.errors import CallTimeoutError
from hardpoint.rpc.calls import Call, Gather
from hardpoint.rpc.channel import Deliver, DriverEnd, WorkerHandle
from hardpoint.rpc.codec import Parcel
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.zeromq.driver_end import ZmqDriverEnd
from hardpoint.rpc.zeromq.wakers import Waker

_LOOK_S = 0.2


class CompositeDriverEnd(DriverEnd):
    """``local`` serves the ranks ``local_ranks``, ``remote`` all ``remote_ranks``. To its own end
    each worker is its place among these: a local one attaches by that number.

    Whoever waits, waits on ``local``; a thread looks at ``remote`` meanwhile, and wakes it.
    """

    def __init__(
        self,
        local: DriverEnd,
        local_ranks: Sequence[int],
        remote: ZmqDriverEnd,
        remote_ranks: Sequence[int],
    ) -> None:
        self.spin_s = local.spin_s
        self._local, self._remote = local, remote
        self._local_ranks, self._remote_ranks = tuple(local_ranks), tuple(remote_ranks)
        self._sending = threading.Lock()
        self._who = 0
        self._closed = False
        self._asked = Waker()
        self._thread = threading.Thread(target=self._run, name="hardpoint-remote", daemon=True)
        self._thread.start()

    def worker_handle(self, rank: int) -> WorkerHandle:
        """Return what worker ``rank`` attaches with, of its own end."""
        if rank in self._local_ranks:
            return self._local.worker_handle(self._local_ranks.index(rank))
        return self._remote.worker_handle(self._remote_ranks.index(rank))

    def send(self, call: Call) -> None:
        """Send it by both ends, or by none."""
        deadline = call.deadline
        wait = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._sending.acquire(timeout=wait):
            raise CallTimeoutError(f"{call.name!r} could not be sent in time: others are waiting")
        try:
            post = self._remote.reserve(call)
            self._local.send(call)
            post()
        finally:
            self._sending.release()
            if self._who:
                self._asked.wake()  # sending may have used up the network's signal

    def rouse(self) -> None:
        """Wake the local workers."""
        self._local.rouse()

    def collect(self, deliver: Deliver, calls: Mapping[int, Gather] | None = None) -> None:
        """Deliver what has come by either."""
        self._local.collect(partial(_renamed, deliver, self._local_ranks))
        self._remote.collect(partial(_renamed, deliver, self._remote_ranks))

    def ready(self) -> bool:
        """Whether a reply has come by either."""
        return self._local.ready() or self._remote.ready()

    def arm(self, who: int) -> None:
        """Say who is to be woken; the thread then looks at the network."""
        self._who = who
        self._local.arm(who)
        if who:
            self._asked.wake()

    def sleep(self, who: int, timeout: float | None) -> None:
        """Sleep where the local workers' replies wake."""
        self._local.sleep(who, timeout)

    def wake(self, who: int) -> None:
        """Wake who sleeps."""
        self._local.wake(who)

    def abandon(self) -> None:
        """Have senders wait for no room any more."""
        self._local.abandon()
        self._remote.abandon()

    def tidy(self) -> None:
        """Tidy both."""
        self._local.tidy()
        self._remote.tidy()

    def close(self) -> None:
        """Close both. Idempotent."""
        self._closed = True
        self._asked.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._local.close()
        self._remote.close()
        self._asked.close()

    def _run(self) -> None:
        """While somebody is to be woken, do it when a reply comes by the network."""
        while not self._closed:
            self._remote.await_reply(self._asked, _LOOK_S if self._who else None)
            who = self._who
            if who and self._remote.ready():
                self._local.wake(who)
                self._remote.await_reply(self._asked, None)  # once for each time that it is armed


def _renamed(
    deliver: Deliver,
    ranks: Sequence[int],
    call_id: int,
    rank: int,
    generation: int,
    value: Parcel | None,
    failure: RemoteFailure | None,
) -> None:
    deliver(call_id, ranks[rank], generation, value, failure)
