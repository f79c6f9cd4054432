from __future__ import annotations

import pytest
import torch
from hardpoint.sampling_params import SamplingParams

GREEDY = {"temperature": 0}


def logits(rows, vocabulary=30, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def test_two_requests_with_different_asks_get_what_they_asked(sample):
    """Also where a neighbour names ids of its own."""
    rows = logits(6)
    wishes = {
        "none": SamplingParams(**GREEDY),
        "own": SamplingParams(**GREEDY, logprobs=0),
        "three": SamplingParams(**GREEDY, logprobs=3),
        "listed": SamplingParams(**GREEDY, logprob_token_ids=(7, 29, 7)),
        "both": SamplingParams(**GREEDY, logprobs=2, logprob_token_ids=(7, 29)),
        "all": SamplingParams(**GREEDY, logprobs=-1),
    }
    sampled = sample(wishes, rows)
    assert set(sampled.logprobs) == {1, 2, 3, 4, 5}
    reference = rows.log_softmax(-1)
    for row, found in sampled.logprobs.items():
        (ids,), (values,), ((rank, *others),) = found.ids, found.values, found.ranks
        assert others == [*range(1, found.num_best + 1)]
        assert ids[0] == sampled.tokens[row] == int(rows[row].argmax())
        assert rank == 1
        assert values == pytest.approx(reference[row, list(ids)].tolist(), abs=1e-5)
        assert list(values[1:]) == sorted(values[1:], reverse=True)
    best = reference.sort(-1, descending=True).indices
    assert len(sampled.logprobs[1].ids[0]) == 1
    assert sampled.logprobs[2].ids[0][1:] == tuple(best[2, :3].tolist())
    assert set(sampled.logprobs[3].ids[0][1:]) == {7, 29}
    assert set(sampled.logprobs[4].ids[0][1:]) == {7, 29, *best[4, :2].tolist()}
    assert sampled.logprobs[4].ids[0][1:3] == tuple(best[4, :2].tolist())
    assert sampled.logprobs[5].ids[0][1:] == tuple(best[5].tolist())
    assert [found.num_best for found in sampled.logprobs.values()] == [0, 3, 0, 2, 30]


def test_equals_do_not_depend_on_what_a_neighbour_asks(sample):
    """16-bit logits have many equals; the lowest ids are told."""
    rows = torch.zeros(2, 300)
    rows[:, 200] = 1.0
    for neighbour in (0, 7, 250):
        wishes = {
            "me": SamplingParams(**GREEDY, logprobs=4),
            "you": SamplingParams(**GREEDY, logprobs=neighbour),
        }
        assert sample(wishes, rows).logprobs[0].ids[0] == (200, 200, 0, 1, 2)


def test_the_rank_counts_what_is_not_below(sample):
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    for token, rank in ((1, 1), (2, 3), (3, 3), (0, 4), (4, 5)):
        wish = SamplingParams(**GREEDY, logprobs=1, allowed_token_ids=(token,))
        found = sample({"a": wish}, row).logprobs[0]
        assert (found.ids[0], found.ranks) == ((token, 1), ((rank, 1),))


def test_best_ones_have_ranks_by_the_same_rule_whatever_a_neighbour_asks(sample):
    """Equals beyond the number asked for count, too."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    ranks = {1: 1, 2: 4, 3: 4, 4: 4, 0: 5, 5: 6}
    for count in range(7):
        wishes = {
            "me": SamplingParams(**GREEDY, logprobs=count),
            "you": SamplingParams(**GREEDY, logprobs=4),
        }
        found = sample(wishes, row.repeat(2, 1)).logprobs[0]
        assert found.ranks[0] == tuple(ranks[token] for token in found.ids[0])


def test_they_are_of_the_raw_logits(sample):
    """Neither temperature, nor cuts, nor penalties, nor bias move them."""
    row = logits(1)
    plain = sample({"a": SamplingParams(**GREEDY, logprobs=-1)}, row).logprobs[0]
    wish = SamplingParams(
        temperature=0.5, top_k=2, seed=1, logprobs=-1, repetition_penalty=1.7, logit_bias={3: 9}
    )
    edited = sample({"a": (wish, (1, 2), (4, 5))}, row).logprobs[0]
    assert edited.ids[0][1:] == plain.ids[0][1:]
    assert edited.values[0][1:] == plain.values[0][1:]


def test_a_row_s_answer_is_the_same_alone(sample):
    rows = logits(5)
    wishes = {
        f"r{count}": SamplingParams(temperature=1, seed=count, logprobs=count) for count in range(5)
    }
    together = sample(wishes, rows)
    for row, name in enumerate(wishes):
        alone = sample(wishes, rows, order=[name])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0].ids == together.logprobs[row].ids
        assert alone.logprobs[0].values[0] == pytest.approx(
            together.logprobs[row].values[0], abs=1e-6
        )
