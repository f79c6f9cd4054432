"""How many tokens each data-parallel copy of the model computes in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from attrs import frozen
from hardpoint.messages import MessageError


@frozen(kw_only=True)
class TokenCounts:
    """``counts[i]``: tokens of copy i in this step, padding included. All copies have the same
    record, so that all choose the same collectives.
    """

    counts: tuple[int, ...]

    @classmethod
    def checked(cls, counts: Sequence[int], *, rank: int, num_tokens: int) -> Self:
        """Return the record as copy ``rank`` sees it. Raises MessageError if its own entry is not
        the ``num_tokens`` of its batch: the copies would wait for one another with other sizes.
        """
        if not 0 <= rank < len(counts) or counts[rank] != num_tokens:
            raise MessageError(
                f"data-parallel rank {rank} computes {num_tokens} tokens, but the copies agreed on "
                f"{list(counts)}"
            )
        return cls(counts=tuple(counts))

    @property
    def most(self) -> int:
        """The tokens of the copy that has most."""
        return max(self.counts)

    @property
    def total(self) -> int:
        """The tokens of all copies."""
        return sum(self.counts)

    def chunks(self, size: int) -> Iterator[TokenCounts]:
        """Give the counts of each round in which every copy computes up to ``size`` tokens, until
        none has any left. For layers whose collectives would not hold all tokens at once.

        A copy that has none left takes part with 1, which belongs to nobody: all must call the same
        number of collectives. Raises ValueError for a size below 1.
        """
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: must be at least 1")
        for start in range(0, max(self.most, 1), size):
            yield TokenCounts(
                counts=tuple(max(1, min(size, count - start)) for count in self.counts)
            )
