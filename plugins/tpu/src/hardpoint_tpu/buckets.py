"""The static shapes: how many requests or tokens are padded to what.

Pure. A *row bucket* is a batch of requests with one token each. A *token bucket* is a flat batch of
prompt tokens, cut into tiles; all tokens of a tile belong to one request, so attention reads one
block table for each tile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attrs import frozen
from hardpoint.errors import HardpointError

LEAST_TILE = 16
MOST_TILES = 16
"""A token bucket is not cut finer than this: a longer tile reads the cache less often."""


class BucketError(HardpointError):
    """A number of requests or tokens has no bucket; the message has both."""


def powers(least: int, most: int) -> tuple[int, ...]:
    """Return the powers of two from ``least``, and ``most`` at the end."""
    sizes = []
    size = least
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def covering(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Return ``sizes`` up to the first that holds ``most``: larger ones would never be used."""
    ordered = sorted(set(sizes))
    return tuple(ordered[: bisect_left(ordered, most) + 1])


def padded(size: int, sizes: Sequence[int], what: str) -> int:
    """Return the least of ``sizes`` (ascending) that holds ``size``. Raises BucketError."""
    place = bisect_left(sizes, size)
    if place == len(sizes):
        raise BucketError(f"{size} {what} fit no bucket of {', '.join(map(str, sizes))}")
    return sizes[place]


@frozen
class Shape:
    """One static shape: ``tiles`` rows of ``tile`` tokens."""

    tiles: int
    tile: int

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.tiles * self.tile

    def __str__(self) -> str:
        return f"{self.tiles} x {self.tile} tokens"


def token_shape(tokens: int) -> Shape:
    """Return how a bucket of ``tokens`` is cut into tiles, of a multiple of 16 tokens each.

    Raises BucketError for a size that cannot be cut so.
    """
    tile = LEAST_TILE * max(1, tokens // (LEAST_TILE * MOST_TILES))
    if tokens < 1 or tokens % tile:
        raise BucketError(f"a bucket of {tokens} tokens is no multiple of {tile}")
    return Shape(tokens // tile, tile)


@frozen(kw_only=True)
class Buckets:
    """What is compiled: ``rows`` for steps of one token a request, ``tokens`` for prompts."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape of the backbone, largest first."""
        prompts = [token_shape(tokens) for tokens in reversed(self.tokens)]
        return (*prompts, *(Shape(rows, 1) for rows in reversed(self.rows)))

    def sampled_rows(self, shape: Shape) -> int:
        """Return the row bucket that holds as many requests as a piece of ``shape`` can have."""
        return padded(min(shape.tiles, self.rows[-1]), self.rows, "requests")

    def pieces(self, counts: Sequence[int]) -> list[tuple[Shape, list[int]]]:
        """Cut a step of ``counts`` tokens a request into pieces that fit a bucket each: (shape,
        indices of its requests), in order.

        A step of single tokens takes row buckets; any other token buckets, each request beginning a
        tile of its own. Raises BucketError for more tokens of one request than the largest bucket.
        """
        pieces: list[tuple[Shape, list[int]]] = []
        start = 0
        while start < len(counts):
            shape, taken = self._piece(counts[start:], single=all(n == 1 for n in counts))
            pieces.append((shape, list(range(start, start + taken))))
            start += taken
        return pieces

    def _piece(self, counts: Sequence[int], *, single: bool) -> tuple[Shape, int]:
        if single:
            taken = min(len(counts), self.rows[-1])
            return Shape(padded(taken, self.rows, "requests"), 1), taken
        largest = token_shape(self.tokens[-1])
        taken = used = 0
        for count in counts[: self.rows[-1]]:
            tiles = -(-count // largest.tile)
            if used + tiles > largest.tiles:
                break
            used, taken = used + tiles, taken + 1
        if not taken:
            raise BucketError(
                f"{counts[0]} tokens of one request fit no bucket of "
                f"{', '.join(map(str, self.tokens))} tokens"
            )
        for tokens in self.tokens:
            shape = token_shape(tokens)
            if sum(-(-count // shape.tile) for count in counts[:taken]) <= shape.tiles:
                return shape, taken
        return largest, taken
