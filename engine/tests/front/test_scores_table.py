"""The scores of tokens as ``generate --json`` and ``batch`` write them."""

from __future__ import annotations

import json
import math

from attrs import evolve
from hardpoint_engine.cli.answer_stream import scores_table
from hardpoint_engine.outputs import Logprob


def test_a_best_token_that_has_an_equal_is_among_the_best():
    """Its rank counts the equal one, too, and may exceed the number of those asked for."""
    first, second = (Logprob(logprob=-1.0, rank=2, decoded_token=text) for text in "ab")
    other = Logprob(logprob=-9.0, rank=7, decoded_token="c")
    for token, position, count, best in (
        (5, {5: first}, 1, [5]),
        (6, {6: second, 5: evolve(first, rank=1)}, 1, [5]),
        (7, {7: other, 5: evolve(first, rank=1), 6: second}, 2, [5, 6]),
        (7, {7: other}, 0, []),
    ):
        (entry,) = scores_table([token], [position], count)
        assert [each["token_id"] for each in entry["top"]] == best


def test_what_was_cut_has_a_score_that_json_can_say():
    """Under ``logprobs_mode = processed_logprobs``."""
    cut = Logprob(logprob=-math.inf, rank=9, decoded_token="d")
    (entry,) = scores_table([5], [{5: Logprob(logprob=0.0, rank=1, decoded_token="a"), 6: cut}], 2)
    assert [each["logprob"] for each in entry["top"]] == [0.0, None]
    json.dumps(entry, allow_nan=False)
