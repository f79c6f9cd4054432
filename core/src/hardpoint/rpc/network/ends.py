"""The ends of the calls' lane across hosts: as over a Unix socket, by a door and a link."""

from __future__ import annotations

from hardpoint.errors import EncodingError
from hardpoint.rpc.calls import Reply
from hardpoint.rpc.channel import ChannelClosedError, WorkerHandle
from hardpoint.rpc.codec import Encoded
from hardpoint.rpc.encoding import Codec
from hardpoint.rpc.network.gate import Door
from hardpoint.rpc.network.link import Link
from hardpoint.rpc.zeromq.driver_end import ZmqDriverEnd
from hardpoint.rpc.zeromq.worker_end import ZmqWorkerEnd


def driver_end(
    door: Door, world_size: int, spin_s: float, codec: Codec, queued: int
) -> ZmqDriverEnd:
    """Return the driver's end behind ``door``; it stops listening when all workers have come."""
    return ZmqDriverEnd(world_size, spin_s, codec, door, most_bytes=queued, lock=door.lock)


class NetworkWorkerEnd(ZmqWorkerEnd):
    """A worker's end; it ends with its connection."""

    _link: Link

    def __init__(self, handle: WorkerHandle, rank: int, codec: Codec) -> None:
        self._largest = int(handle.data["largest"])
        super().__init__(handle, rank, codec)

    def _connect(self, handle: WorkerHandle) -> None:
        self._link = Link(self._socket, handle.data)

    def _disconnect(self) -> None:
        self._link.close()

    def _comes(self, seconds: float | None) -> bool:
        found = self._link.comes(seconds)
        if not found and self._link.lost:
            raise ChannelClosedError("the connection to the driver was lost, or refused")
        return found

    def _fits(self, reply: Reply, encoded: Encoded | None) -> None:
        if encoded is None:
            return
        longest = max(len(encoded.data), *(each.nbytes for each in encoded.buffers), 0)
        if longest > self._largest:
            raise EncodingError(
                f"the result of {reply.of!r} has {longest} bytes in one piece; the channel to the "
                f"driver takes {self._largest}"
            )
