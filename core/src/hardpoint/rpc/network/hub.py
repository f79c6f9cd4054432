"""All that a driver has for its workers on other hosts, in one object.

The driver makes a :class:`Hub`, hands each remote worker what :meth:`Hub.worker_data` returns (by a
way that is authenticated: it holds that worker's key), and uses :attr:`Hub.end` as any driver's end
and :meth:`Hub.lane` as the end of any control lane. In the worker, :func:`attach` and
:class:`hardpoint.rpc.network.lanes.WorkerLane` make the other sides.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hardpoint.rpc.channel import WorkerEnd, WorkerHandle
from hardpoint.rpc.encoding import Codec, codec_named
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.ends import NetworkWorkerEnd, driver_end
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.lanes import Lanes
from hardpoint.rpc.zeromq.driver_end import ZmqDriverEnd

if TYPE_CHECKING:
    from hardpoint.registry import Registry

_T = TypeVar("_T")

CALLS, CONTROL = "calls", "control"
RENDEZVOUS = "network:"
"""What the address of a rendezvous begins with that is a file with the data of a store."""
OPEN_TENSORS = (
    "what workers of several hosts compute together is exchanged by the platform's collective "
    "library, which may neither encrypt nor ask who comes (gloo does not): keep the network "
    "between these hosts to themselves: %s"
)
"""What is logged once, as a warning, when a group over several hosts starts: with their
addresses.
"""


class Hub:
    """Doors, channel, lanes and store of one group of workers.

    ``remote`` are the ranks of ``world_size`` that live on other hosts, ``host`` the explicit
    address of this one to listen at, ``ports`` those of calls and control (0: any that is free).
    What crosses is encoded by the typed codec, whatever ``rpc.pickle`` says of this host's workers.
    Raises ConfigError for an address that is none, OSError or ZMQError for one that is taken.
    """

    def __init__(
        self,
        world_size: int,
        remote: Sequence[int],
        host: str,
        *,
        registry: Registry | None = None,
        spin_us: float = 200.0,
        bounds: Bounds | None = None,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self.bounds = Bounds() if bounds is None else bounds
        self.remote = tuple(remote)
        self.gate = Gate(self.bounds)
        self._end: ZmqDriverEnd | None = None
        self._lanes: Lanes | None = None
        try:
            calls = self.gate.open(CALLS, host, ports[0])
            control = self.gate.open(CONTROL, host, ports[1])
            self._end = driver_end(
                calls, len(self.remote), spin_us * 1e-6, codec_across(registry), self.bounds.queued
            )
            self._lanes = Lanes(control, self.remote, range(world_size))
        except BaseException:
            self.close()
            raise
        self.addresses = {CALLS: calls.address, CONTROL: control.address}

    @property
    def end(self) -> ZmqDriverEnd:
        """The driver's end of the calls, of the remote ranks alone, numbered as in ``remote``."""
        return _there(self._end)

    def lane(self, rank: int) -> socket.socket:
        """Return the driver's end of the control lane of ``rank``, for a ControlLane."""
        return _there(self._lanes).take(rank)

    def worker_data(self, rank: int) -> dict[str, Any]:
        """Return what worker ``rank`` is to be given, fit for JSON; it holds that rank's keys."""
        handle = self.end.worker_handle(self.remote.index(rank))
        lanes = _there(self._lanes)
        return {"channel": dict(handle.data), "lane": lanes.data(rank)}

    def rendezvous_data(self, rank: int, address: str) -> dict[str, Any]:
        """Return what worker ``rank``, remote or not, meets the others by; ``address`` is that of
        its host, at which its collective library is to listen. Holds that rank's keys.
        """
        return {"listen": address, "store": _there(self._lanes).store_data(rank)}

    def close(self) -> None:
        """End lanes and channel, which the workers take for the driver's end. Idempotent."""
        if self._end is not None:
            self._end.close()
        if self._lanes is not None:
            self._lanes.close()
        self.gate.close()


def attach(data: Mapping[str, Any], rank: int, codec: Codec | None = None) -> WorkerEnd:
    """Attach worker ``rank`` by the ``channel`` of its data; ``codec`` is the typed one, which
    learns the plugins' messages when they are loaded.
    """
    chosen = codec_across() if codec is None else codec
    return NetworkWorkerEnd(WorkerHandle(fds=(), data=data), rank, chosen)


def codec_across(registry: Registry | None = None) -> Codec:
    """Return the codec of what crosses hosts: known types alone, nothing is ever unpickled."""
    codec = codec_named("across")
    if registry is not None:
        codec.learn(registry)
    return codec


def rendezvous_file(data: Mapping[str, Any]) -> tuple[int, str]:
    """Put a rendezvous into memory without a name; return its descriptor, which the worker keeps
    open, and the address for ``Boot.rendezvous``, in which no key is.
    """
    fd = os.memfd_create("hardpoint-rendezvous", os.MFD_CLOEXEC)
    os.write(fd, json.dumps(data).encode())
    return fd, f"{RENDEZVOUS}/proc/self/fd/{fd}"


def _there(part: _T | None) -> _T:
    if part is None:
        raise RuntimeError("the hub was not made")
    return part
