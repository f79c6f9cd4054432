"""Rows of log-probabilities: ranks of best ones, and rows joined to one message."""

from __future__ import annotations

from hardpoint.logprob_rows import best_ranks, joined
from hardpoint.messages import Logprobs
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.lists(st.sampled_from([-1.0, -2.0, -3.0, -float("inf")]), min_size=1, max_size=8)


@given(VALUES, st.integers(1, 8))
def test_a_rank_is_how_many_are_not_below_whatever_is_cut_off(values, count):
    best = sorted(values, reverse=True)[:count]
    last = sum(value >= best[-1] for value in values)
    ranks = tuple(sum(other >= value for other in values) for value in best)
    assert best_ranks(best, last) == ranks


def test_what_is_no_number_has_its_place():
    assert best_ranks([float("nan")] * 3, 0) == (1, 2, 3)
    assert best_ranks([], 0) == ()


def test_rows_of_one_request_become_one_message():
    rows = [
        Logprobs(ids=((token, 1),), values=((-2.0, -1.0),), ranks=((2, 1),), num_best=1)
        for token in (5, 6)
    ]
    assert joined(rows) == Logprobs(
        ids=((5, 1), (6, 1)),
        values=((-2.0, -1.0),) * 2,
        ranks=((2, 1),) * 2,
        num_best=1,
    )
    assert joined([]).ids == ()
