"""Capture sizes: the token counts that graphs are made for, and the padding to them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from attrs import field, frozen
from hardpoint.errors import ConfigError

LARGEST_SIZE = 512
"""The most tokens that graphs are made for by default; beyond, launching is a small share."""
FINE_STEP, FINE_END = 8, 256
"""Sizes from 8 on are this far apart, up to here; then they are 16 apart."""
COARSE_STEP = 16


def _rising(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


@frozen
class CaptureSizes:
    """Rising token counts, each at least 1; none at all: everything is eager."""

    sizes: tuple[int, ...] = field(converter=_rising)

    @property
    def largest(self) -> int:
        """The largest, 0 if there is none."""
        return self.sizes[-1] if self.sizes else 0

    def pad(self, num_tokens: int) -> int | None:
        """Return the smallest size that holds ``num_tokens`` tokens, None if none does."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None


def default_sizes(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, then every 8th, from 256 on every 16th number up to ``largest``."""
    ladder = (1, 2, 4, *range(FINE_STEP, FINE_END, FINE_STEP))
    coarse = range(FINE_END, largest + 1, COARSE_STEP)
    return tuple(size for size in (*ladder, *coarse) if size <= largest)


def capture_sizes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    uniform_query: int = 1,
    multiple: int = 1,
    given: Sequence[int] | None = None,
    preferred: Sequence[int] = (),
    largest: int = LARGEST_SIZE,
) -> CaptureSizes:
    """Return the sizes to make graphs for. Called by the runner before it warms up.

    ``given`` is the user's list (``graph_sizes``), ``preferred`` the device's (empty: the ladder of
    :func:`default_sizes`), which ends at twice the tokens of the largest uniform batch and at
    ``largest``. No size is more than a step may have. Every size is made a multiple of
    ``uniform_query`` (1 + number of drafts), so that uniform batches fill it, and of ``multiple``
    (what ranks share the tokens of a step by).

    Raises ConfigError for given sizes that are not positive, or none of which a step can have.
    """
    most = max_num_batched_tokens
    if given is not None:
        sizes = _given_sizes(given, most)
    else:
        largest = min(2 * max_num_seqs * uniform_query, largest, most)
        sizes = tuple(n for n in preferred if 0 < n <= largest) or default_sizes(largest)
    factor = math.lcm(uniform_query, multiple)
    fitting = _rounded(sizes, factor, most)
    if given and not fitting:
        raise ConfigError(
            f"graph_sizes = {list(given)}: none is left that is a multiple of {factor} and at most "
            f"{most} tokens (max_num_batched_tokens)"
        )
    return CaptureSizes(fitting)


def _given_sizes(given: Sequence[int], most: int) -> tuple[int, ...]:
    if wrong := [size for size in given if size < 1]:
        raise ConfigError(f"graph_sizes: {wrong[0]} is no number of tokens; it must be at least 1")
    return tuple(size for size in given if size <= most)


def _rounded(sizes: Iterable[int], factor: int, most: int) -> tuple[int, ...]:
    rounded = {-(-size // factor) * factor for size in sizes}
    return tuple(sorted(size for size in rounded if size <= most))
