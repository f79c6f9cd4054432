"""Making the rows of :class:`hardpoint.messages.Logprobs`, the same way on every platform."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.messages import Logprobs


def best_ranks(values: Sequence[float], last: int) -> tuple[int, ...]:
    """Return the rank of each of the best ``values`` of a vocabulary, which are best first.

    A rank is how many of the whole vocabulary are not below a value. ``last`` is that of the last
    one here, whose equals may not all be here.
    """
    ranks = [max(last, len(values))] * len(values)
    for place in range(len(values) - 2, -1, -1):
        same = values[place] == values[place + 1]
        ranks[place] = ranks[place + 1] if same else place + 1
    return tuple(ranks)


def joined(rows: Sequence[Logprobs]) -> Logprobs:
    """Return rows of one request, one token each, as one message."""
    return Logprobs(
        ids=tuple(row.ids[0] for row in rows),
        values=tuple(row.values[0] for row in rows),
        ranks=tuple(row.ranks[0] for row in rows),
        num_best=rows[0].num_best if rows else 0,
    )
