"""torch's store at MASTER_ADDR and MASTER_PORT, where each rank says who it is.

Where the launcher serves none (torchrun does), rank 0 serves it, at that address alone, until all
have met. What stands in it is JSON, of which nothing is run.
"""

from __future__ import annotations

import errno
import importlib
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hardpoint.errors import ConfigError, ExecutorFailedError, StartTimeoutError, WorkerDiedError
from hardpoint.records import Problem

from hardpoint_external_launcher.launchers import ADDRESS, PORT, Seat
from hardpoint_external_launcher.lines import born_at
from hardpoint_external_launcher.presence import Presence
from hardpoint_external_launcher.settings import START_TIMEOUT

LOOK = 0.02
"""Seconds between two looks at the store."""


class Store:
    """torch's store at the place where all meet; rank 0 serves it where nobody else does."""

    def __init__(self, seat: Seat, deadline: float, timeout: float, secret: bytes = b"") -> None:
        """``secret`` seals what the ranks write; empty: nothing does."""
        self._seat = seat
        self._secret = secret
        self._deadline = deadline
        self._timeout = timeout
        self._store: Any = None

    def gather(self, own: Presence) -> list[Presence]:
        """Tell who this rank is; return all ranks' presences, in order."""
        seat, found = self._seat, {own.rank: own}
        prefix = ""
        while len(found) < seat.world_size:
            try:
                if self._store is None:
                    self._store = self._opened()
                    prefix = self._told(own)
                for rank in range(seat.world_size):
                    key = f"{prefix}/{rank}"
                    if rank not in found and self._store.check([key]):
                        found[rank] = Presence.of(rank, self._store.get(key), self._secret)
            except RuntimeError as error:  # also its DistError: who serves it is gone, or begins
                if seat.rank == 0 and not seat.hosts_store:
                    raise ExecutorFailedError(f"the store of rank 0 failed: {error}") from error
                self._store, found = None, {own.rank: own}
            self._check(found)
            time.sleep(LOOK)
        return [found[rank] for rank in sorted(found)]

    def _told(self, own: Presence) -> str:
        """Write this rank's presence; return what stands before all ranks' keys: the run, and which
        engine of this run it is.
        """
        name = f"hardpoint/{self._seat.run}"
        number = self._store.add(f"{name}/engines/{own.rank}", 1)
        prefix = f"{name}/{number}"
        self._store.set(f"{prefix}/{own.rank}", own.text(self._secret))
        return prefix

    def _check(self, found: Mapping[int, Presence]) -> None:
        for rank, peer in found.items():
            with suppress(ProcessLookupError):
                if peer.host != found[self._seat.rank].host or born_at(peer.pid) == peer.born:
                    continue
            raise WorkerDiedError(rank=rank, pid=peer.pid, exit=None)
        if time.monotonic() > self._deadline:
            waiting = set(range(self._seat.world_size)) - {*found, self._seat.rank}
            place = f"{self._seat.address}:{self._seat.port}"
            stages = dict.fromkeys(sorted(waiting), f"not come to {place}")
            raise StartTimeoutError(seconds=self._timeout, stages=stages, key=START_TIMEOUT)

    def _opened(self) -> Any:
        distributed: Any = importlib.import_module("torch.distributed")
        seat = self._seat
        serves = seat.rank == 0 and not seat.hosts_store
        given: dict[str, Any] = {}
        if serves:
            given["master_listen_fd"] = self._listener().detach()
        else:
            self._await_listener()
        patience = max(1.0, self._deadline - time.monotonic())
        return distributed.TCPStore(
            seat.address,
            seat.port,
            is_master=serves,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            **given,
        )

    def _listener(self) -> socket.socket:
        """Listen at the address itself: torch's own would be every address of the host."""
        address, port = self._seat.address, self._seat.port
        try:
            family, kind, _, _, place = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = socket.socket(family, kind)
        except OSError as error:
            raise self._unusable(ADDRESS, str(address), error) from error
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen()
        except OSError as error:
            made.close()
            key, value = (
                (PORT, str(port)) if error.errno == errno.EADDRINUSE else (ADDRESS, str(address))
            )
            raise self._unusable(key, value, error) from error
        return made

    def _unusable(self, key: str, value: str, error: OSError) -> ConfigError:
        problem = Problem(
            key=key,
            value=value,
            message=f"rank 0 cannot listen there: {error.strerror}.",
            way_out="Name an address of this host, and a port that is free.",
        )
        return ConfigError(str(problem), problems=(problem,))

    def _await_listener(self) -> None:
        """Wait until somebody serves; torch's own wait cannot be interrupted."""
        while True:
            try:
                socket.create_connection((self._seat.address, self._seat.port), 1.0).close()
            except OSError:
                self._check({})
                time.sleep(LOOK)
            else:
                return

    def close(self) -> None:
        """Leave it, and serve no more. Idempotent."""
        self._store = None
