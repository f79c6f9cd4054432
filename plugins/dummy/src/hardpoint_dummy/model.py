"""The fake model: its next token is a pure function of the cells that a request reads.

The cell of a position is a hash of the cell before it, as read through the request's blocks, and of
the token; so it stands for the whole prefix, as a key or value of a deep layer does. The state
after a position is a hash of *all* cells up to it. With the right blocks it therefore depends on
the tokens alone, and with any wrong or stale one it differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_MASK = (1 << 64) - 1
_TOP = 8.0
_SLOPE = 0.25


def mix(value: int) -> int:
    """Return 64 well mixed bits of ``value``: the finaliser of SplitMix64 (Steele, Lea and Flood,
    2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_of(*parts: object) -> int:
    """Return 64 bits that depend on the text of ``parts``, equal in every process."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest())


class FakeModel:
    """Weights are one number; the vocabulary is ``vocab_size`` ids."""

    def __init__(self, weights: int, vocab_size: int) -> None:
        self.weights = weights
        self.vocab_size = vocab_size

    def cell(self, before: int | None, content: int, salt: int) -> int:
        """Return the cell after cell ``before`` (None at the beginning); never 0, which means
        unwritten. ``salt`` stands for the adapter.
        """
        if before is None:
            before = mix(self.weights ^ salt)
        return mix(before ^ mix(content)) | 1

    def state(self, groups: Iterable[array[int]]) -> int:
        """Return the state after reading ``groups``: each KV cache group's cells."""
        digest = blake2b(digest_size=8)
        for cells in groups:
            digest.update(cells)
        return int.from_bytes(digest.digest())

    def best(self, state: int) -> int:
        """Return the most likely next token."""
        return state % self.vocab_size

    def logits(self, state: int) -> list[float]:
        """Return the logits of all tokens: highest at :meth:`best`, falling by 0.25 an id from
        there, round the vocabulary.
        """
        best, size = self.best(state), self.vocab_size
        return [_TOP - _SLOPE * ((token - best) % size) for token in range(size)]

    def pooled(self, state: int) -> tuple[float, ...]:
        """Return a vector of 4 numbers in [0, 1) that stands for an embedding."""
        return tuple(mix(state + index) / 2**64 for index in range(4))


def bytes_content(data: bytes) -> int:
    """Return the content of a position that holds an input other than a token."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def joined(cells: Sequence[int]) -> array[int]:
    """Return cells as the array that :meth:`FakeModel.state` reads."""
    return array("Q", cells)
