"""Who holds which heads, columns and layers."""

from __future__ import annotations

import pytest
from hardpoint.errors import ConfigError
from hardpoint_runtime.parallel.spans import Span, heads, share, shares, why_not
from hypothesis import given
from hypothesis import strategies as st

DEFAULT_MODEL = (9, 3)


def spans(num_heads, num_kv_heads, size):
    found = [heads(num_heads, num_kv_heads, index, size) for index in range(size)]
    return [(h.query.range, h.kv.range) for h in found]


def test_two_ranks_of_the_default_model_share_its_heads_unevenly():
    assert spans(*DEFAULT_MODEL, 2) == [(range(6), range(2)), (range(6, 9), range(2, 3))]


def test_three_ranks_share_them_evenly():
    assert [len(query) for query, _ in spans(*DEFAULT_MODEL, 3)] == [3, 3, 3]


def test_more_ranks_than_key_value_heads_hold_copies_of_them():
    found = spans(*DEFAULT_MODEL, 9)
    assert [kv.start for _, kv in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [query.start for query, _ in found] == list(range(9))
    uneven = spans(*DEFAULT_MODEL, 6)
    assert [(list(q), list(kv)) for q, kv in uneven[:2]] == [([0, 1], [0]), ([2], [0])]


@pytest.mark.parametrize(
    ("size", "reason"),
    [(4, "more ranks than the 3 key-value heads"), (12, "more ranks than the 9 query heads")],
)
def test_sizes_that_cannot_be(size, reason):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size}: {reason}"):
        heads(*DEFAULT_MODEL, 0, size)


@given(kv=st.integers(1, 12), each=st.integers(1, 8), size=st.integers(1, 40))
def test_every_query_head_is_somewhere_once_and_with_its_key_value_head(kv, each, size):
    if why_not(kv * each, kv, size) is not None:
        return
    found = spans(kv * each, kv, size)
    assert sorted(head for query, _ in found for head in query) == list(range(kv * each))
    for query, keys in found:
        assert len(query) > 0
        assert len(query) % len(keys) == 0  # as attention groups them
        for place, head in enumerate(query):
            assert head // each == keys[place // (len(query) // len(keys))]


@given(total=st.integers(0, 200), size=st.integers(1, 12))
def test_shares_are_consecutive_and_differ_by_one_at_most(total, size):
    found = shares(total, size)
    assert [index for span in found for index in span.range] == list(range(total))
    lengths = [span.size for span in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_a_span_of_things_with_several_elements():
    assert share(3, 1, 2) == Span(2, 3, 3)
    assert share(3, 1, 2).times(64) == Span(128, 192, 192)
    assert not share(3, 1, 2).is_whole
    assert share(3, 0, 1).is_whole
