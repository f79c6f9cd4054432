"""Which KV blocks hold the beginning of which token sequences, so that equal beginnings are
computed once.

Only full blocks have a name. The name of block i is the digest of the name of block i - 1 and the
block's own tokens; the chain starts from what else determines the contents: the model, the weight
epoch, the adapter and the request's salt. So two equal names mean equal contents, also against
somebody who chooses tokens to make names collide (BLAKE2b, 32 bytes).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from attrs import define

from hardpoint_engine.scheduling.block_pool import BlockPool

_DIGEST = 32


def chain_root(parts: Iterable[str | int]) -> bytes:
    """Return the name that a chain starts from; equal only for equal ``parts``, in order."""
    digest = blake2b(digest_size=_DIGEST)
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def extend_chain(
    names: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append to ``names`` those of further full blocks of ``tokens``, until there are
    ``num_blocks``.
    """
    for index in range(len(names), num_blocks):
        digest = blake2b(names[-1] if names else root, digest_size=_DIGEST)
        digest.update(array("Q", tokens[index * block_size : (index + 1) * block_size]))
        names.append(digest.digest())


@define
class PrefixStats:
    """Totals since the start: tokens looked for in the cache, and tokens found."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class PrefixCache:
    """Name -> block, for the blocks of one pool. One block has one name at most."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.on_recycle = self._forget
        self.stats = PrefixStats()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of ``names``. Nothing is held by it."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def store(self, name: bytes, block: int) -> None:
        """Remember that ``block``, which is held and full, has these contents; the first such block
        counts.
        """
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name
            self.pool.name(block)

    def clear(self) -> None:
        """Forget all contents. Blocks stay with those who hold them."""
        self._block_of.clear()
        self._name_of.clear()
        self.pool.forget_names()

    def _forget(self, block: int) -> None:
        del self._block_of[self._name_of.pop(block)]
