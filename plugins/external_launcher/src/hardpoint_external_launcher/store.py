"""Where all ranks of a launcher say who they are: names and texts, of which nothing is run.

Who serves it, and who gets there, is a matter of the place (``places``).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from hardpoint.errors import ExecutorFailedError, StartTimeoutError, WorkerDiedError
from hardpoint.rpc.network.store import StoreLostError

from hardpoint_external_launcher.lines import born_at, settle
from hardpoint_external_launcher.named_store import MeetingStore
from hardpoint_external_launcher.places import Place, unusable
from hardpoint_external_launcher.presence import Presence
from hardpoint_external_launcher.seats import Occupant, Seats, engines
from hardpoint_external_launcher.settings import START_TIMEOUT

_logger = logging.getLogger("hardpoint.executor.external_launcher")

FIRST_WORD = 10.0
"""Seconds until it is said who is awaited; the next word is as long again after that, and so on."""
LOOK = 0.02
"""Seconds between two looks at the store."""
AGAIN = 0.1
"""Seconds until the next try to reach it."""
ASK_SECONDS = 3.0
"""For how long rank 0 asks whoever listens where it wants to who that is."""
FAREWELL_SECONDS = 3.0
"""For how long rank 0 serves on for ranks that are still looking for others."""
LOST = (StoreLostError, RuntimeError)
"""What is raised where the store cannot be reached, Hardpoint's own or torch's."""


class Store:
    """The store at ``place``, which rank 0 serves until all have met, where nobody else does.

    ``secret`` seals what the ranks write; empty: nothing does. ``deadline`` is monotonic, in s, and
    ``timeout`` how long that was from the start.
    """

    def __init__(self, place: Place, deadline: float, timeout: float, secret: bytes = b"") -> None:
        self._place = place
        self._seat = seat = place.seat
        self._secret = secret
        self._deadline = deadline
        self._timeout = timeout
        self._name = f"hardpoint/{seat.run}"
        self._prefix = ""
        self._store: MeetingStore | None = None
        self._began = time.monotonic()
        self._pause = FIRST_WORD
        self._next_word = self._began + FIRST_WORD

    def gather(self, own: Presence) -> list[Presence]:
        """Tell who this rank is; return all ranks' presences, in order. Raises ConfigError where
        two processes have one rank.
        """
        try:
            return self._gather(own)
        finally:
            if self._store is not None and self._prefix:
                with suppress(*LOST):
                    self._count(self._store, "left", 1)

    def _gather(self, own: Presence) -> list[Presence]:
        seat, found = self._seat, {own.rank: own}
        occupant = Occupant(pid=own.pid, born=own.born, host=own.host, name=socket.gethostname())
        while len(found) < seat.world_size:
            try:
                if self._store is None:
                    self._store = self._opened(occupant)
                    seats = Seats(self._store, self._name, seat, self._secret)
                    seats.take(occupant)
                    number = self._tell(self._store, own)
                seats.check(number)
                for rank in range(seat.world_size):
                    key = f"{self._prefix}/{rank}"
                    if rank not in found and self._store.check([key]):
                        found[rank] = Presence.of(rank, self._store.get(key), self._secret)
            except LOST as error:  # who serves it is gone, or begins
                if self._place.serves:
                    raise ExecutorFailedError(f"the store of rank 0 failed: {error}") from error
                self._place.leave()
                self._store, self._prefix, found = None, "", {own.rank: own}
            self._check(found)
            if len(found) < seat.world_size:
                self._say_who_is_awaited(found)
                time.sleep(AGAIN if self._store is None else LOOK)
        return [found[rank] for rank in sorted(found)]

    def _tell(self, store: MeetingStore, own: Presence) -> int:
        """Write this rank's presence, behind what all ranks' keys begin with: the run, and which
        engine of this run it is; return that number.
        """
        number = int(store.add(engines(self._name, own.rank), 1))
        self._prefix = f"{self._name}/{number}"
        self._count(store, "here", 1)
        store.set(f"{self._prefix}/{own.rank}", own.text(self._secret))
        return number

    def _count(self, store: MeetingStore, what: str, more: int = 0) -> int:
        return int(store.add(f"{self._prefix}/{what}", more))

    def _opened(self, own: Occupant) -> MeetingStore:
        try:
            self._place.serve()
        except OSError as error:
            self._ask_who_serves(own)
            raise unusable(self._seat, error) from error
        return self._place.reach(max(1.0, self._deadline - time.monotonic()))

    def _ask_who_serves(self, own: Occupant) -> None:
        """Raise ConfigError if it is a rank 0, too, at the same place."""
        try:
            seats = Seats(self._place.reach(ASK_SECONDS), self._name, self._seat, self._secret)
            if settle(lambda: seats.has(0), time.monotonic() + ASK_SECONDS, LOOK):
                seats.take(own)
        except LOST:
            return
        finally:
            self._place.leave()

    def _check(self, found: Mapping[int, Presence]) -> None:
        for rank, peer in found.items():
            with suppress(ProcessLookupError):
                if peer.host != found[self._seat.rank].host or born_at(peer.pid) == peer.born:
                    continue
            raise WorkerDiedError(rank=rank, pid=peer.pid, exit=None)
        waiting = set(range(self._seat.world_size)) - {*found, self._seat.rank}
        if waiting and time.monotonic() > self._deadline:
            stages = dict.fromkeys(
                sorted(waiting), f"not come to {self._place}{self._place.absent}"
            )
            if self._store is None and 0 in stages:
                stages[0] = f"{stages[0]}, or done there: once all have met, nobody else gets in"
            raise StartTimeoutError(seconds=self._timeout, stages=stages, key=START_TIMEOUT)

    def _say_who_is_awaited(self, found: Mapping[int, Presence]) -> None:
        now = time.monotonic()
        if now < self._next_word:
            return
        self._pause *= 2
        self._next_word = now + self._pause
        missing = [rank for rank in range(self._seat.world_size) if rank not in found]
        _logger.warning(
            "waiting at %s for ranks %s, for %.0f s so far: they have not come%s",
            self._place,
            missing,
            now - self._began,
            self._place.absent,
        )

    def close(self) -> None:
        """Leave it, and serve no more: once the others that are here know what this rank knows.
        Idempotent.
        """
        store, self._store = self._store, None
        if store is not None and self._prefix and self._place.serves:
            until = time.monotonic() + FAREWELL_SECONDS
            with suppress(*LOST):
                settle(lambda: self._count(store, "left") >= self._count(store, "here"), until)
        self._place.close()
