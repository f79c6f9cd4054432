"""Meeting across hosts: the ranks find each other by the driver's store, then connect directly.

The rendezvous ``network:FILE`` names a file that holds, as JSON, the address of this rank's host,
at which its collective library listens, and what the driver's store is reached by. That store is
behind keys, as are the calls; torch's own would listen for anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from hardpoint.errors import HardpointError
from hardpoint.rpc.network.hub import RENDEZVOUS
from hardpoint.rpc.network.store import StoreClient

from hardpoint_runtime.parallel.communicator import Meeting
from hardpoint_runtime.parallel.groups import Group
from hardpoint_runtime.parallel.process_group import (
    ProcessGroupCommunicator,
    distributed,
    gloo,
)


class DriverStore(distributed.Store):  # type: ignore[misc]
    """The driver's store as one of torch's."""

    def __init__(self, client: StoreClient, timeout: float) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        """Put a value."""
        self._client.set(key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._client.get(key.encode()) or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return self._client.add(key.encode(), amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._client.wait([key.encode() for key in keys], 0.0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there. Raises RuntimeError, as torch's do, if they do not come."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        if not self._client.wait([key.encode() for key in keys], seconds):
            raise RuntimeError(f"timed out: {', '.join(keys)} did not come in {seconds:g} s")

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._client.delete(key.encode())


class HostsCommunicator(ProcessGroupCommunicator):
    """One rank's end of a group whose members are on several hosts; over TCP, by gloo."""

    def __init__(self, group: Group, meeting: Meeting) -> None:
        data = meeting_data(meeting.rendezvous)
        kept: _Kept | None = meeting.shared.get(RENDEZVOUS)
        if kept is None:
            kept = meeting.shared[RENDEZVOUS] = _Kept(StoreClient(data["store"]))
        kept.users += 1
        self._kept: _Kept | None = kept
        store = DriverStore(kept.client, meeting.timeout)
        super().__init__(group, meeting, store, partial(gloo, host=str(data["listen"])))

    def close(self) -> None:
        """Leave the group, and the store with the last group of this rank."""
        super().close()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.users -= 1
            if not kept.users:
                kept.client.close()


class _Kept:
    """The one connection to the store that all groups of a rank use."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.users = 0


def meeting_data(rendezvous: str) -> Mapping[str, Any]:
    """Return what the file of a rendezvous across hosts holds. Raises HardpointError."""
    path = Path(rendezvous.removeprefix(RENDEZVOUS))
    try:
        data = json.loads(path.read_bytes())
        return {"listen": data["listen"], "store": data["store"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HardpointError(
            f"the rendezvous {rendezvous!r} cannot be read ({error}): the executor hands it to "
            "every worker"
        ) from error
