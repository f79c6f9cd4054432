"""Capture sizes and padding."""

from __future__ import annotations

import pytest
from hardpoint.errors import ConfigError
from hardpoint_runtime.graphs.sizes import CaptureSizes, capture_sizes, default_sizes
from hypothesis import given
from hypothesis import strategies as st


def sizes(max_num_seqs=256, max_num_batched_tokens=8192, **more) -> tuple[int, ...]:
    return capture_sizes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **more
    ).sizes


def test_the_ladder():
    assert default_sizes(0) == ()
    assert default_sizes(9) == (1, 2, 4, 8)
    ladder = sizes()
    assert ladder[:5] == (1, 2, 4, 8, 16)
    assert set(range(8, 256, 8)) | set(range(256, 513, 16)) | {1, 2, 4} == set(ladder)


def test_where_the_ladder_ends():
    assert sizes(max_num_seqs=8)[-1] == 16  # twice the largest decode batch
    assert sizes(max_num_seqs=8, uniform_query=3)[-1] == 48
    assert sizes(max_num_batched_tokens=100)[-1] == 96
    assert sizes(largest=1024, max_num_seqs=1000)[-1] == 1024
    assert sizes(max_num_seqs=1, max_num_batched_tokens=1) == (1,)


def test_a_device_prefers_its_own_within_the_same_bounds():
    assert sizes(max_num_seqs=8, preferred=(3, 6, 12, 24)) == (3, 6, 12)
    assert sizes(max_num_seqs=1, preferred=(16, 32)) == (1, 2)


def test_a_given_list_is_sorted_deduplicated_and_kept_below_the_budget():
    assert sizes(given=(7, 3, 7, 9000, 600)) == (3, 7, 600)
    assert sizes(given=()) == ()
    with pytest.raises(ConfigError, match="graph_sizes: 0 is no number of tokens"):
        sizes(given=(4, 0))
    with pytest.raises(ConfigError, match=r"graph_sizes = \[9\]: none is left.*at most 8 tokens"):
        sizes(given=(9,), max_num_batched_tokens=8)


def test_sizes_are_multiples_of_the_query_and_of_what_ranks_share():
    assert sizes(given=(1, 2, 4, 8), uniform_query=3) == (3, 6, 9)
    assert sizes(given=(1, 2, 4, 8), uniform_query=3, multiple=2) == (6, 12)
    assert sizes(given=(7,), multiple=4, max_num_batched_tokens=9) == (8,)
    assert all(size % 5 == 0 for size in sizes(uniform_query=5))
    with pytest.raises(ConfigError, match="multiple of 4"):
        sizes(given=(7,), multiple=4, max_num_batched_tokens=7)


@given(
    ladder=st.sets(st.integers(1, 300), max_size=20).map(CaptureSizes),
    n=st.integers(1, 310),
    more=st.integers(0, 50),
)
def test_padding_is_the_smallest_size_that_holds_monotone_and_idempotent(ladder, n, more):
    padded = ladder.pad(n)
    assert padded == min((size for size in ladder.sizes if size >= n), default=None)
    assert ladder.pad(ladder.largest + 1) is None
    if padded is not None:
        assert padded >= n
        assert ladder.pad(padded) == padded
    further = ladder.pad(n + more)
    assert further is None or (padded is not None and padded <= further)
