"""Who a rank is, as it stands in the store."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping

from attrs import field, frozen
from hardpoint.errors import ExecutorFailedError, WorkerDiedError

from hardpoint_external_launcher.lines import born_at, opened, shielded


@frozen(kw_only=True)
class Presence:
    """What a rank says of itself. ``offers`` are peer -> the descriptor that it is to write to,
    ``memory`` that of the memory which the ranks of this host share (of rank 0), ``board`` that of
    the claims (of rank 0), ``proof`` that of the memory by which it shows that it wrote this,
    ``door`` how it is reached from other hosts (empty: not at all), and ``name`` what its host is
    called.
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
    proof: int = -1
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
                "proof": self.proof,
                "door": dict(self.door),
                "name": self.name,
            }
        )
        return sealed(secret, told)

    @classmethod
    def of(cls, rank: int, text: bytes, secret: bytes = b"") -> Presence:
        """Read what stands in the store. Raises ExecutorFailedError for anything else, and for what
        was sealed by another secret.
        """
        try:
            told = json.loads(unsealed(secret, text.decode()))
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
        except UnsealedError:
            raise ExecutorFailedError(
                f"what stands in the store for rank {rank} is not sealed by this rank's key "
                "file: that rank has another one or none, or a stranger wrote it"
            ) from None
        except _NO_PRESENCE as error:
            raise ExecutorFailedError(
                f"what stands in the store for rank {rank} is not its presence: {error!r}"
            ) from None
        if found.rank != rank:
            raise ExecutorFailedError(f"rank {found.rank} stands in the store as rank {rank}")
        return found

    def prove(self) -> None:
        """Write what shows that this process wrote this presence."""
        os.pwrite(self.proof, self._digest(), 0)

    def verify(self) -> None:
        """Raise ExecutorFailedError unless the process that it names wrote it; of this host alone.

        Anybody may reach the store and write there whose descriptors are to be opened. But in
        memory of a process of this user, which has this name, nobody else writes.
        """
        try:
            memory = opened(self.pid, self.proof, os.O_RDONLY, f"/memfd:{PROOF} ")
        except PermissionError as error:
            raise shielded(self.pid, self.rank, error) from error
        except OSError as error:
            raise self._unproven() from error
        try:
            found = os.pread(memory, 64, 0)
        finally:
            os.close(memory)
        if not hmac.compare_digest(found, self._digest()):
            raise self._unproven()

    def _digest(self) -> bytes:
        return hashlib.sha256(self.text().encode()).digest()

    def _unproven(self) -> ExecutorFailedError:
        try:
            if born_at(self.pid) != self.born:
                return WorkerDiedError(rank=self.rank, pid=self.pid, exit=None)
        except ProcessLookupError:
            return WorkerDiedError(rank=self.rank, pid=self.pid, exit=None)
        return ExecutorFailedError(
            f"what stands in the store for rank {self.rank} was not written by process {self.pid}, "
            "which it names: a stranger writes there"
        )


_NO_PRESENCE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
)  # fmt: skip
_NUMBERS = ("rank", "pid", "born", "memory", "board", "seed", "proof")
SEAL = 64
"""Characters of a seal."""
PROOF = "hardpoint-presence"
"""What the memory is called in which a presence is proven."""


class UnsealedError(ValueError):
    """A text that was not sealed by this secret."""

    def __str__(self) -> str:
        return "it is not sealed by this rank's key file"


def sealed(secret: bytes, text: str) -> str:
    """Return a text with its seal, which is empty without a secret."""
    return _seal(secret, text) + text


def unsealed(secret: bytes, text: str) -> str:
    """Return the text behind a seal. Raises UnsealedError."""
    seal = _seal(secret, text[SEAL:])
    if not hmac.compare_digest(text[: len(seal)].encode(), seal.encode()):
        raise UnsealedError
    return text[len(seal) :]


def _seal(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest() if secret else ""
