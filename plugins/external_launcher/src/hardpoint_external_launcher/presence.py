"""Who a rank is, as it stands in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping

from attrs import frozen
from hardpoint.errors import ExecutorFailedError


@frozen(kw_only=True)
class Presence:
    """What a rank says of itself. ``offers`` are peer -> the descriptor that it is to write to,
    ``memory`` that of the memory which the ranks of this host share (of rank 0), ``board`` that of
    the claims (of rank 0).
    """

    rank: int
    pid: int
    born: int
    host: str
    offers: Mapping[int, int]
    memory: int
    board: int
    seed: int
    identity: Mapping[str, str]

    def text(self) -> str:
        """Return what stands in the store."""
        return json.dumps(
            {
                "rank": self.rank,
                "pid": self.pid,
                "born": self.born,
                "host": self.host,
                "offers": {str(rank): fd for rank, fd in self.offers.items()},
                "memory": self.memory,
                "board": self.board,
                "seed": self.seed,
                "identity": dict(self.identity),
            }
        )

    @classmethod
    def of(cls, rank: int, text: bytes) -> Presence:
        """Read what stands in the store. Raises ExecutorFailedError for anything else."""
        try:
            told = json.loads(text)
            offers = {int(peer): int(fd) for peer, fd in told["offers"].items()}
            numbers = {name: int(told[name]) for name in _NUMBERS}
            identity = {str(name): str(value) for name, value in told["identity"].items()}
            found = cls(host=str(told["host"]), offers=offers, identity=identity, **numbers)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExecutorFailedError(
                f"what stands in the store for rank {rank} is not its presence: {error!r}"
            ) from None
        if found.rank != rank:
            raise ExecutorFailedError(f"rank {found.rank} stands in the store as rank {rank}")
        return found


_NUMBERS = ("rank", "pid", "born", "memory", "board", "seed")
