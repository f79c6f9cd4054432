"""Rows whose logits are no numbers: they get token 0 and are counted, and nobody else notices."""

from __future__ import annotations

import pytest
import torch
from hardpoint.messages import GrammarOutput
from hardpoint.sampling_params import SamplingParams

SIZE = 3000
WAYS = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3},
    "top_k": {"seed": 3, "top_k": 5},
    "wide top_k": {"seed": 3, "top_k": 2000},
    "top_p": {"seed": 3, "top_p": 0.9},
    "min_p": {"seed": 3, "min_p": 0.1, "temperature": 0.5},
    "all cuts": {"seed": 3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bias": {"temperature": 0, "logit_bias": {7: -100.0}},
    "logprobs": {"temperature": 0, "logprobs": 3, "logprob_token_ids": (1, 5)},
    "all logprobs": {"seed": 3, "logprobs": -1},
}


def spoil(row, kind):
    """Spoil a row in place; return how many logits are counted."""
    if kind == "one nan":
        row[7] = torch.nan
    elif kind == "all nan":
        row[:] = torch.nan
    elif kind == "infinite":
        row[[4, 7]] = torch.inf
    elif kind == "both":
        row[4], row[7], row[9:20] = torch.nan, torch.inf, -torch.inf
    else:
        row[:] = -torch.inf
    return {"one nan": 1, "infinite": 2, "both": 2, "all nan": SIZE}.get(kind, 0)


@pytest.mark.parametrize("kind", ["one nan", "all nan", "infinite", "both", "nothing allowed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_is_no_number_gets_token_0_and_leaves_its_neighbours_alone(sample, way, kind):
    logits = torch.randn(2 * len(WAYS), SIZE, generator=torch.Generator().manual_seed(1)) * 3
    names = list(WAYS)
    wishes = {f"{side} {name}": SamplingParams(**WAYS[name]) for name in names for side in "ab"}
    before = sample(wishes, logits)
    assert before.nan_counts == {}
    bad = 2 * names.index(way) + 1
    spoilt = logits.clone()
    count = spoil(spoilt[bad], kind)
    after = sample(wishes, spoilt)
    assert after.tokens[bad] == 0
    assert after.nan_counts == {bad: count}
    others = [row for row in range(len(wishes)) if row != bad]
    assert [after.tokens[row] for row in others] == [before.tokens[row] for row in others]
    for row in before.logprobs:
        if row != bad:
            assert after.logprobs[row] == before.logprobs[row]
    if bad in before.logprobs:
        found = after.logprobs[bad]
        assert found.ids[0][0] == 0
        assert all(0 <= token < SIZE for token in found.ids[0])
        assert len(found.values[0]) == len(found.ids[0])
        assert found.ranks[0][0] == 1


@pytest.mark.parametrize("way", WAYS)
def test_such_a_row_alone(sample, way):
    logits = torch.full((1, SIZE), torch.nan)
    found = sample({"a": SamplingParams(**WAYS[way])}, logits)
    assert (found.tokens, found.nan_counts) == ((0,), {0: SIZE})


def test_sixteen_bit_logits(sample):
    logits = torch.zeros(3, 50, dtype=torch.bfloat16)
    logits[:, 9] = 1
    logits[1, 3] = torch.nan
    found = sample({name: SamplingParams(temperature=0) for name in "abc"}, logits)
    assert (found.tokens, found.nan_counts) == ((9, 0, 9), {1: 1})


def test_what_is_not_allowed_does_not_matter(sample):
    """A NaN among the forbidden tokens leaves a choice; wishes may leave none."""
    logits = torch.zeros(2, 32)
    logits[0, 3] = torch.nan
    logits[:, 9] = 1
    wish = SamplingParams(temperature=0, allowed_token_ids=(8, 9))
    assert sample({"a": wish, "b": wish}, logits).tokens == (9, 9)
    grammar = GrammarOutput(req_ids=("b",), masks=((b"\1\0\0\0",),))
    found = sample({"a": wish, "b": wish}, logits, grammar=grammar)
    assert (found.tokens, found.nan_counts) == ((9, 0), {1: 0})
