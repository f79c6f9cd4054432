"""The two ends of a channel between a driver and its workers, whatever carries the bytes.

The driver's end is made with :func:`create` before any worker is started; each worker attaches with
the handle made for it: descriptors that it inherited and plain data. Calls go to every worker,
replies come back one by one. An end belongs to the process that made it and, but for ``send``,
which any thread of the driver may call, to one thread at a time.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from hardpoint.errors import HardpointError, UnsupportedError

if TYPE_CHECKING:
    from hardpoint.rpc import codec
    from hardpoint.rpc.calls import Call, Gather, PackedCall, Reply
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.failures import RemoteFailure

Deliver = Callable[[int, int, int, "codec.Parcel | None", "RemoteFailure | None"], None]
"""Takes (call id, rank, generation, value, failure): :meth:`CallTable.acknowledge`, for one."""

KINDS = ("shared_memory", "zmq")
NOBODY, CALLER, THREAD = 0, 1, 2
"""Who sleeps on the driver's side and is to be woken by the next reply."""


def usual_kind() -> str:
    """Return the kind to take unless told otherwise: shared memory, if the processor keeps the
    order that it needs.
    """
    from hardpoint.rpc.shared_memory.memory import is_ordered

    return "shared_memory" if is_ordered() else "zmq"


class ChannelClosedError(HardpointError):
    """The channel was closed, here or at the other end.

    What to do: nothing by itself: it follows from a shutdown or from the end of a worker; look for
    that error.
    """


@frozen(kw_only=True)
class WorkerHandle:
    """What a worker needs to attach: inherited descriptors, in order, and data fit for JSON.

    Descriptors are numbered as they are in this process; a launcher that hands them over under
    other numbers makes a new handle with those.
    """

    fds: tuple[int, ...]
    data: Mapping[str, Any] = field(factory=dict, repr=False)  # it may hold a key


class DriverEnd(ABC):
    """The driver's end: broadcasts calls, collects replies. Used by executors and the Receiver."""

    spin_s: float
    """Seconds for which a waiting side yields the processor before it sleeps."""

    @abstractmethod
    def worker_handle(self, rank: int) -> WorkerHandle:
        """Return what worker ``rank`` attaches with."""

    @abstractmethod
    def send(self, call: Call) -> None:
        """Send ``call`` to every worker; any thread. Waits, until the call's deadline, only while
        the slowest worker has no room.

        Raises EncodingError for what cannot travel and CallTimeoutError at the deadline (no worker
        will see the call then), ChannelClosedError.
        """

    def rouse(self) -> None:  # noqa: B027 - most have nobody to wake
        """Let the workers know that a call is about to be made. Any thread."""

    @abstractmethod
    def collect(self, deliver: Deliver, calls: Mapping[int, Gather] | None = None) -> None:
        """Call ``deliver`` for each reply that is here, without waiting. One thread at a time.

        An end may enter plain values into the open ``calls``, by id, itself instead of delivering
        them, and take those out that have all: their callbacks then run in here.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Whether a reply is here. Any thread."""

    def spin(self, seconds: float, wanted: int) -> bool:
        """Yield the processor until replies of ``wanted`` workers are here, or for ``seconds``
        since one more was; return whether any is. One thread at a time.
        """
        end = time.monotonic() + seconds
        while True:
            os.sched_yield()  # before the first look, too: no answer is that quick
            if self.ready():
                return True
            if time.monotonic() >= end:
                return False

    @abstractmethod
    def arm(self, who: int) -> None:
        """Say who is to be woken by the next reply: NOBODY, CALLER or THREAD.

        After arming and before sleeping, :meth:`ready` is to be asked again.
        """

    @abstractmethod
    def sleep(self, who: int, timeout: float | None) -> None:
        """Wait until woken as ``who``, at most ``timeout`` seconds. May return early."""

    @abstractmethod
    def wake(self, who: int) -> None:
        """Wake who sleeps as ``who``. Any thread."""

    @abstractmethod
    def abandon(self) -> None:
        """Have senders that wait for room give up by ChannelClosedError, and let none wait any
        more: some worker is gone. Any thread.
        """

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do
        """Give memory back that large messages have not needed for some time. Any thread; called
        every few seconds by whoever watches the workers.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all descriptors and mappings back; workers get ChannelClosedError. Idempotent."""


class WorkerEnd(ABC):
    """A worker's end: takes calls, acknowledges each. Belongs to the thread that serves calls."""

    @abstractmethod
    def receive(self, timeout: float | None = None) -> PackedCall | None:
        """Return the next call, or None after ``timeout`` seconds (None: wait for ever).

        Its arguments are decoded by whoever runs it, so what cannot be rebuilt fails that call
        alone. Raises ChannelClosedError.
        """

    @abstractmethod
    def reply(self, reply: Reply) -> None:
        """Acknowledge a call. A value that cannot be encoded becomes an error reply.

        Raises ChannelClosedError.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back, save memory of which views are still held. Idempotent."""


def create(
    kind: str,
    world_size: int,
    *,
    spin_us: float = 200.0,
    codec: Codec | None = None,
    native: bool = True,
) -> DriverEnd:
    """Make a channel to ``world_size`` workers; called in the driver.

    ``spin_us`` is ``rpc.spin_us``; ``codec`` defaults to the one of ``rpc.pickle = "local"``;
    without ``native`` neither side uses compiled code. Raises UnsupportedError if this system has
    no channel of that kind.
    """
    from hardpoint.rpc.encoding import PickleCodec

    chosen = PickleCodec() if codec is None else codec
    if kind == "shared_memory":
        from hardpoint.rpc.shared_memory.driver_end import SharedDriverEnd
        from hardpoint.rpc.shared_memory.memory import is_ordered

        if not is_ordered():
            raise UnsupportedError(
                "the channel shared_memory",
                f"a machine of the kind {os.uname().machine}",
                reason="it may show one process's stores to another in any order",
                hint="Choose zmq.",
            )
        return SharedDriverEnd(world_size, spin_us * 1e-6, chosen, native=native)
    if kind == "zmq":
        from hardpoint.rpc.zeromq.driver_end import ZmqDriverEnd

        return ZmqDriverEnd(world_size, spin_us * 1e-6, chosen)
    raise _unknown(kind)


def attach(handle: WorkerHandle, rank: int, *, codec: Codec | None = None) -> WorkerEnd:
    """Attach worker ``rank``; called in its process, which then owns the handle's descriptors.

    ``codec`` must be of the driver's kind. Raises UnsupportedError for a handle that is none.
    """
    from hardpoint.rpc.encoding import PickleCodec

    chosen = PickleCodec() if codec is None else codec
    kind = handle.data.get("kind")
    if kind == "shared_memory":
        from hardpoint.rpc.shared_memory.worker_end import SharedWorkerEnd

        return SharedWorkerEnd(handle, rank, chosen)
    if kind == "zmq":
        from hardpoint.rpc.zeromq.worker_end import ZmqWorkerEnd

        return ZmqWorkerEnd(handle, rank, chosen)
    if kind == "network":
        from hardpoint.rpc.network.ends import NetworkWorkerEnd

        return NetworkWorkerEnd(handle, rank, chosen)
    raise _unknown(kind)


def _unknown(kind: object) -> UnsupportedError:
    return UnsupportedError(
        f"a channel of kind {kind!r}", "this core", hint=f"Choose one of {', '.join(KINDS)}."
    )
