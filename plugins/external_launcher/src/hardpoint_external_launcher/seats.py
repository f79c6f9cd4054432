"""Each rank once: a process takes its rank's seat in the store where all meet. One that finds it
taken is refused, and so are all that wait there with it: who belongs together is not known then.
"""

from __future__ import annotations

import json

from attrs import frozen
from hardpoint.errors import ConfigError, ExecutorFailedError
from hardpoint.records import Problem

from hardpoint_external_launcher.launchers import PORT, Seat
from hardpoint_external_launcher.lines import born_at
from hardpoint_external_launcher.named_store import MeetingStore
from hardpoint_external_launcher.presence import sealed, unsealed


@frozen(kw_only=True)
class Occupant:
    """The process that has a seat: its number, when it began, the space of process numbers in which
    that is so, and what its host is called.
    """

    pid: int
    born: int
    host: str
    name: str

    def gone(self, own: Occupant) -> bool:
        """Whether it has ended, which is known of processes of the ``own`` host alone."""
        if self.host != own.host:
            return False
        try:
            return born_at(self.pid) != self.born
        except ProcessLookupError:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.name}"


def engines(name: str, rank: int) -> str:
    """Return where it stands how many engines a rank has begun to start."""
    return f"{name}/engines/{rank}"


class Seats:
    """The seats of one start of the group, whose keys begin with ``name``."""

    def __init__(self, store: MeetingStore, name: str, seat: Seat, secret: bytes) -> None:
        self._store = store
        self._name = name
        self._seat = seat
        self._secret = secret

    def take(self, own: Occupant) -> None:
        """Take the seat of this rank, also from a process that has ended: one may follow another.
        Raises ConfigError that names both processes if it is another's; the others are told.
        """
        mine, there = self._text(own), ""
        while (found := self._look(mine, there)) != mine:
            other = self._occupant(found)
            if not other.gone(own):
                self._tell_others(found, mine)
                raise self._refusal(self._seat.rank, other, own)
            there = found

    def _tell_others(self, first: str, second: str) -> None:
        rank = self._seat.rank
        number = int(self._store.add(engines(self._name, rank), 0))
        told = {"rank": rank, "engine": number, "first": first, "second": second}
        self._store.set(self._twice, json.dumps(told))

    def has(self, rank: int) -> bool:
        """Whether somebody has taken the seat of ``rank``."""
        return bool(self._store.check([self._of(rank)]))

    def check(self, engine: int) -> None:
        """Raise ConfigError if two processes have asked for one seat since the ranks of the engine
        of this number meet: who came too late for an earlier one disturbs nobody.
        """
        if not self._store.check([self._twice]):
            return
        try:
            told = json.loads(self._store.get(self._twice))
            rank, first, second = int(told["rank"]), str(told["first"]), str(told["second"])
            number = int(told["engine"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ExecutorFailedError(f"a stranger wrote into the store: {error!r}") from None
        if max(number, 1) >= engine:  # 0: the first one was just about to be counted
            raise self._refusal(rank, self._occupant(first), self._occupant(second))

    # Within.

    @property
    def _twice(self) -> str:
        return f"{self._name}/twice"

    def _of(self, rank: int) -> str:
        return f"{self._name}/seats/{rank}"

    def _look(self, mine: str, there: str) -> str:
        held: bytes = self._store.compare_set(self._of(self._seat.rank), there, mine)
        return held.decode(errors="replace")

    def _text(self, occupant: Occupant) -> str:
        told = {"pid": occupant.pid, "born": occupant.born, "host": occupant.host}
        return sealed(self._secret, json.dumps({**told, "name": occupant.name}))

    def _occupant(self, text: str) -> Occupant:
        try:
            told = json.loads(unsealed(self._secret, text))
            return Occupant(
                pid=int(told["pid"]),
                born=int(told["born"]),
                host=str(told["host"]),
                name=str(told["name"])[:80],
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ExecutorFailedError(
                f"what stands in the store for a seat is none of this group's: {error}"
            ) from None

    def _refusal(self, rank: int, first: Occupant, second: Occupant) -> ConfigError:
        problem = Problem(
            key=self._seat.rank_variable,
            value=rank,
            message=f"{first} has this rank, and so has {second}.",
            way_out=f"Start one process for each rank, and another group at another {PORT}.",
        )
        text = f"rank {rank} was started twice: {problem}"
        return ConfigError(text, problems=(problem,))
