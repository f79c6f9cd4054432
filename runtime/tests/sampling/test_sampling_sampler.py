"""The whole pipeline: order of stages, batch against one by one, seeds, and what it costs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hardpoint.errors import InvalidRequestError
from hardpoint.messages import GrammarOutput
from hardpoint.sampling_params import SamplingParams
from torch.utils._python_dispatch import TorchDispatchMode


def bad_words(rng, vocabulary):
    return tuple((*([4] * rng.randrange(3)), token) for token in range(0, vocabulary, 2))


def random_wish(rng, vocabulary):
    output = rng.choice([[rng.randrange(vocabulary) for _ in range(rng.randrange(6))], [3, 4, 4]])
    greedy = rng.random() < 0.25
    sampling = SamplingParams(
        temperature=0 if greedy else rng.choice([0.005, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, vocabulary]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        logit_bias=rng.choice([None, None, {2: 3.0}]),
        allowed_token_ids=rng.choice([None, None, None, tuple(range(0, vocabulary, 3))]),
        min_tokens=rng.choice([0, 0, 5]),
        bad_word_ids=rng.choice([(), (), bad_words(rng, vocabulary)]),
        max_tokens=None,
        seed=rng.randrange(1 << 40),
        logprobs=rng.choice([None, None, 2]),
    )
    prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 6))]
    return sampling, prompt, output


@pytest.mark.parametrize("vocabulary", [40, 3000])
def test_a_batch_is_its_rows_one_by_one_in_any_order(sample, vocabulary):
    rng = random.Random(vocabulary)
    for seed in range(4):
        wishes = {f"r{index}": random_wish(rng, vocabulary) for index in range(24)}
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(24, vocabulary, generator=generator) * 3
        together = sample(wishes, logits, eos_token_ids=(1,))
        alone = [sample(wishes, logits, [name], eos_token_ids=(1,)).tokens[0] for name in wishes]
        assert list(together.tokens) == alone
        order = rng.sample(sorted(wishes), 24)
        shuffled = sample(wishes, logits, order, eos_token_ids=(1,))
        assert dict(zip(order, shuffled.tokens, strict=True)) == dict(
            zip(wishes, alone, strict=True)
        )


def test_a_seeded_request_is_the_same_beside_anybody(sample):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).repeat(40, 1)[:100]
    mine = SamplingParams(temperature=1.0, seed=77)
    alone = [sample({"me": (mine, (1,), (5,) * n)}, logits[:1]).tokens[0] for n in range(30)]
    for others in (SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0)):
        beside = [
            sample(
                {"x": others, "me": (mine, (1,), (5,) * n), "y": others}, logits[[1, 0, 2]]
            ).tokens[1]
            for n in range(30)
        ]
        assert beside == alone
    assert len(set(alone)) > 10
    unlike = SamplingParams(temperature=1.0, seed=78)
    assert [
        sample({"me": (unlike, (1,), (5,) * n)}, logits[:1]).tokens[0] for n in range(30)
    ] != alone


def test_greedy_takes_the_lowest_of_equals_and_ignores_the_cuts(sample):
    row = torch.tensor([[0.0, 4.0, 4.0, 1.0]])
    for temperature in (0, 9e-6):
        wish = SamplingParams(temperature=temperature, top_k=1, top_p=0.1, min_p=1.0)
        assert sample({"a": wish}, row).tokens == (1,)


def test_sixteen_bit_logits(sample):
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    wishes = {
        "g": SamplingParams(temperature=0),
        "k": SamplingParams(top_k=4, seed=1),
        "p": SamplingParams(top_p=0.3, seed=2),
        "l": SamplingParams(seed=3, logprobs=2),
    }
    assert sample(wishes, logits).tokens == sample(wishes, logits.float()).tokens


class Counting(TorchDispatchMode):
    """Counts the operations that read or write something as wide as the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.wide: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
        if any(x.dim() and x.shape[-1] >= self.vocabulary for x in tensors):
            self.wide.append(function.overloadpacket.__name__)
        return result


def test_a_greedy_batch_costs_one_argmax(sample):
    logits = torch.randn(8, 4000)
    wishes = {f"r{index}": SamplingParams(temperature=0) for index in range(8)}
    rows = logits.clone()
    with Counting(4000) as counting:
        sample(wishes, rows)
    # gather reads one value a row.
    assert [name for name in counting.wide if name != "index"] == ["argmax", "gather"]


def test_nothing_as_wide_as_the_vocabulary_is_sorted(sample):
    logits = torch.randn(4, 30_000) * 4
    wishes = {f"r{index}": SamplingParams(top_k=50, top_p=0.9, seed=index) for index in range(4)}
    with Counting(30_000) as counting:
        sample(wishes, logits)
    assert "topk" in counting.wide
    assert not {"sort", "cumsum", "argsort"} & set(counting.wide)


def mask(allowed, vocabulary):
    bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return (np.packbits(bits, bitorder="little").tobytes(),)


def test_grammar_masks_belong_to_requests_not_to_rows(sample):
    rows = torch.zeros(4, 70)
    rows[:, 0] = 5.0
    wishes = {name: SamplingParams(temperature=0) for name in "abcd"}
    grammar = GrammarOutput(
        req_ids=("d", "unfinished", "b"),
        masks=(mask({33, 69}, 70), mask({1}, 70), mask({64}, 70)),
    )
    assert sample(wishes, rows, grammar=grammar).tokens == (0, 64, 0, 33)
    assert sample(wishes, rows, order=["d", "a", "b"], grammar=grammar).tokens == (33, 0, 64)


def test_a_grammar_that_allows_nothing_but_the_end_outweighs_the_least_length(sample):
    wish = SamplingParams(temperature=0, min_tokens=3, bad_word_ids=((33,),))
    for allowed, token in (({1}, 1), ({1, 64}, 64), ({1, 33, 64}, 64)):
        grammar = GrammarOutput(req_ids=("a",), masks=(mask(allowed, 70),))
        found = sample({"a": wish}, torch.zeros(1, 70), grammar=grammar, eos_token_ids=(1,))
        assert found.tokens == (token,)


def test_a_mask_of_the_wrong_length_is_refused(sample):
    grammar = GrammarOutput(req_ids=("a",), masks=((b"\xff" * 8,),))
    with pytest.raises(InvalidRequestError, match=r"request 'a' has 8 bytes, .* needs 12"):
        sample({"a": SamplingParams(temperature=0)}, torch.zeros(1, 70), grammar=grammar)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 0.01, "top_k": 2**63 - 1},
        {"temperature": 2, "top_p": 1e-300},
        {"temperature": 0, "repetition_penalty": 1e300},
        {"temperature": 0, "repetition_penalty": 1e-300},
    ],
    ids=str,
)
def test_the_largest_and_least_values_fit_their_columns(sample, extreme):
    """Prompt and output hold every token, and the best logit is 0: no factor may make it a NaN."""
    logits = torch.tensor([[-1.0, 0.0, -2.0, -3.0]])
    wish = SamplingParams(seed=1, max_tokens=None, **extreme)
    assert sample({"a": (wish, (0, 1), (2, 3))}, logits).tokens == (1,)
