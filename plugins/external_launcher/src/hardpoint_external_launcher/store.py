"""torch's store at MASTER_ADDR and MASTER_PORT, where each rank says who it is.

Where the launcher serves none (torchrun does), rank 0 serves it, at that address alone, until all
have met. What stands in it is JSON, of which nothing is run.
"""

from __future__ import annotations

import errno
import importlib
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from hardpoint.config.problems import config_error
from hardpoint.errors import ConfigError, ExecutorFailedError, StartTimeoutError, WorkerDiedError
from hardpoint.records import Problem

from hardpoint_external_launcher.launchers import (
    ADDRESS,
    PORT,
    Seat,
    every_interface,
    of_one_interface,
)
from hardpoint_external_launcher.lines import born_at, settle
from hardpoint_external_launcher.presence import Presence
from hardpoint_external_launcher.seats import Occupant, Seats, engines
from hardpoint_external_launcher.settings import START_TIMEOUT

LOOK = 0.02
"""Seconds between two looks at the store."""
ASK_SECONDS = 3.0
"""For how long rank 0 asks whoever listens where it wants to who that is."""
FAREWELL_SECONDS = 3.0
"""For how long rank 0 serves on for ranks that are still looking for others."""


class Store:
    """torch's store at the place where all meet; rank 0 serves it where nobody else does."""

    def __init__(self, seat: Seat, deadline: float, timeout: float, secret: bytes = b"") -> None:
        """``secret`` seals what the ranks write; empty: nothing does."""
        self._seat = seat
        self._secret = secret
        self._deadline = deadline
        self._timeout = timeout
        self._name = f"hardpoint/{seat.run}"
        self._prefix = ""
        self._store: Any = None
        self._serves = seat.rank == 0 and not seat.hosts_store

    def gather(self, own: Presence) -> list[Presence]:
        """Tell who this rank is; return all ranks' presences, in order. Raises ConfigError where
        two processes have one rank.
        """
        try:
            return self._gather(own)
        finally:
            if self._store is not None and self._prefix:
                with suppress(RuntimeError):
                    self._count("left", 1)

    def _gather(self, own: Presence) -> list[Presence]:
        seat, found = self._seat, {own.rank: own}
        occupant = Occupant(pid=own.pid, born=own.born, host=own.host, name=socket.gethostname())
        while len(found) < seat.world_size:
            try:
                if self._store is None:
                    self._store = self._opened(occupant)
                    seats = Seats(self._store, self._name, seat, self._secret)
                    seats.take(occupant)
                    number = self._tell(own)
                seats.check(number)
                for rank in range(seat.world_size):
                    key = f"{self._prefix}/{rank}"
                    if rank not in found and self._store.check([key]):
                        found[rank] = Presence.of(rank, self._store.get(key), self._secret)
            except RuntimeError as error:  # also its DistError: who serves it is gone, or begins
                if self._serves:
                    raise ExecutorFailedError(f"the store of rank 0 failed: {error}") from error
                self._store, self._prefix, found = None, "", {own.rank: own}
            self._check(found)
            if len(found) < seat.world_size:
                time.sleep(LOOK)
        return [found[rank] for rank in sorted(found)]

    def _tell(self, own: Presence) -> int:
        """Write this rank's presence, behind what all ranks' keys begin with: the run, and which
        engine of this run it is; return that number.
        """
        number = int(self._store.add(engines(self._name, own.rank), 1))
        self._prefix = f"{self._name}/{number}"
        self._count("here", 1)
        self._store.set(f"{self._prefix}/{own.rank}", own.text(self._secret))
        return number

    def _count(self, what: str, more: int = 0) -> int:
        return int(self._store.add(f"{self._prefix}/{what}", more))

    def _check(self, found: Mapping[int, Presence]) -> None:
        for rank, peer in found.items():
            with suppress(ProcessLookupError):
                if peer.host != found[self._seat.rank].host or born_at(peer.pid) == peer.born:
                    continue
            raise WorkerDiedError(rank=rank, pid=peer.pid, exit=None)
        waiting = set(range(self._seat.world_size)) - {*found, self._seat.rank}
        if waiting and time.monotonic() > self._deadline:
            place = f"{self._seat.address}:{self._seat.port}"
            stages = dict.fromkeys(sorted(waiting), f"not come to {place}")
            if self._store is None:
                stages[0] = f"{stages[0]}, or done there: once all have met, nobody else gets in"
            raise StartTimeoutError(seconds=self._timeout, stages=stages, key=START_TIMEOUT)

    def _opened(self, own: Occupant) -> Any:
        given: dict[str, Any] = {}
        if self._serves:
            given = {"is_master": True, "master_listen_fd": self._listener(own).detach()}
        else:
            self._await_listener()
        return self._made(max(1.0, self._deadline - time.monotonic()), **given)

    def _made(self, patience: float, **given: Any) -> Any:
        """Return torch's store. Raises RuntimeError for what listens there and is none; torch would
        wait for a word of it for ever, whatever its timeout, so that is another thread's to do.
        """
        distributed: Any = importlib.import_module("torch.distributed")
        given = {"timeout": timedelta(seconds=patience), "wait_for_workers": False, **given}
        made: SimpleQueue[Any] = SimpleQueue()

        def make() -> None:
            try:
                made.put(distributed.TCPStore(self._seat.address, self._seat.port, **given))
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                made.put(error)

        threading.Thread(target=make, name="hardpoint-store", daemon=True).start()
        try:
            found = made.get(timeout=patience)
        except Empty:
            raise RuntimeError("what listens there does not answer") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _listener(self, own: Occupant | None = None) -> socket.socket:
        """Listen at the address itself: torch's own would be every address of the host. Raises
        ConfigError; if another process serves this group there as rank 0, it names that.
        """
        address, port = self._seat.address, self._seat.port
        try:
            family, kind, _, _, place = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            if not of_one_interface(str(place[0])):
                raise config_error([every_interface(f"{address} = {place[0]}")])
            made = socket.socket(family, kind)
        except OSError as error:
            raise self._unusable(ADDRESS, str(address), error) from error
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen()
        except OSError as error:
            made.close()
            if own is not None:
                self._ask_who_serves(own)
            key, value = (
                (PORT, str(port)) if error.errno == errno.EADDRINUSE else (ADDRESS, str(address))
            )
            raise self._unusable(key, value, error) from error
        return made

    def _ask_who_serves(self, own: Occupant) -> None:
        """Raise ConfigError if it is a rank 0, too, at the same place."""
        with suppress(OSError, RuntimeError):
            socket.create_connection((self._seat.address, self._seat.port), 1.0).close()
            seats = Seats(self._made(ASK_SECONDS), self._name, self._seat, self._secret)
            if settle(lambda: seats.has(0), time.monotonic() + ASK_SECONDS, LOOK):
                seats.take(own)

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
        """Leave it, and serve no more: once the others that are here know what this rank knows.
        Idempotent.
        """
        if self._store is not None and self._prefix and self._serves:
            until = time.monotonic() + FAREWELL_SECONDS
            with suppress(RuntimeError):
                settle(lambda: self._count("left") >= self._count("here"), until)
        self._store = None
