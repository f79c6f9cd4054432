"""Token counts of data-parallel copies."""

from __future__ import annotations

import pytest
from hardpoint.messages import MessageError
from hardpoint_runtime.token_counts import TokenCounts
from hypothesis import given
from hypothesis import strategies as st


def test_a_copy_checks_its_own_entry():
    counts = TokenCounts.checked([3, 50, 0], rank=1, num_tokens=50)
    assert (counts.counts, counts.most, counts.total) == ((3, 50, 0), 50, 53)
    with pytest.raises(MessageError, match=r"rank 1 computes 49 tokens.*agreed on \[3, 50, 0\]"):
        TokenCounts.checked([3, 50, 0], rank=1, num_tokens=49)
    for rank in (3, -1):
        with pytest.raises(MessageError, match=f"rank {rank}"):
            TokenCounts.checked([3, 50, 0], rank=rank, num_tokens=0)


def test_rounds_of_a_chunk():
    rounds = [each.counts for each in TokenCounts(counts=(3, 50, 0)).chunks(20)]
    assert rounds == [(3, 20, 1), (1, 20, 1), (1, 10, 1)]
    with pytest.raises(ValueError, match="at least 1"):
        list(TokenCounts(counts=(3,)).chunks(0))


@given(counts=st.lists(st.integers(0, 60), min_size=1, max_size=5), size=st.integers(1, 70))
def test_every_token_is_in_one_round_and_copies_keep_step(counts, size):
    rounds = list(TokenCounts(counts=tuple(counts)).chunks(size))
    assert len(rounds) == max(1, -(-max(counts) // size))
    for rank, count in enumerate(counts):
        sizes = [each.counts[rank] for each in rounds]
        assert all(1 <= each <= size for each in sizes)
        real = -(-count // size)  # then come the rounds that it only takes part in
        assert sum(sizes[:real]) == count
        assert set(sizes[real:]) <= {1}
