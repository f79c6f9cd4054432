"""Who a rank is, as it stands in the store."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from attrs import field, frozen
from hardpoint.errors import ExecutorFailedError


@frozen(kw_only=True)
class Presence:
    """What a rank says of itself. ``offers`` are peer -> the descriptor that it is to write to,
    ``memory`` that of the memory which the ranks of this host share (of rank 0), ``board`` that of
    the claims (of rank 0), ``door`` how it is reached from other hosts (empty: not at all), and
    ``name`` what its host is called.
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
    door: Mapping[str, str] = field(factory=dict)
    name: str = ""

    def text(self, secret: bytes = b"") -> str:
        """Return what stands in the store, sealed by ``secret`` if there is one."""
        told = json.dumps(
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
                "door": dict(self.door),
                "name": self.name,
            }
        )
        return _seal(secret, told) + told

    @classmethod
    def of(cls, rank: int, text: bytes, secret: bytes = b"") -> Presence:
        """Read what stands in the store. Raises ExecutorFailedError for anything else, and for what
        was sealed by another secret.
        """
        try:
            content = text.decode()
            seal = _seal(secret, content[SEAL:])
            if not hmac.compare_digest(content[: len(seal)].encode(), seal.encode()):
                raise ExecutorFailedError(
                    f"what stands in the store for rank {rank} is not sealed by this rank's key "
                    "file: that rank has another one or none, or a stranger wrote it"
                )
            told = json.loads(content[len(seal) :])
            offers = {int(peer): int(fd) for peer, fd in told["offers"].items()}
            numbers = {name: int(told[name]) for name in _NUMBERS}
            identity = {str(name): str(value) for name, value in told["identity"].items()}
            door = {str(name): str(value) for name, value in told["door"].items()}
            found = cls(
                host=str(told["host"]),
                offers=offers,
                identity=identity,
                door=door,
                name=str(told["name"])[:80],
                **numbers,
            )
        except _NO_PRESENCE as error:
            raise ExecutorFailedError(
                f"what stands in the store for rank {rank} is not its presence: {error!r}"
            ) from None
        if found.rank != rank:
            raise ExecutorFailedError(f"rank {found.rank} stands in the store as rank {rank}")
        return found


_NO_PRESENCE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
)  # fmt: skip
_NUMBERS = ("rank", "pid", "born", "memory", "board", "seed")
SEAL = 64
"""Characters of a seal."""


def _seal(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest() if secret else ""
