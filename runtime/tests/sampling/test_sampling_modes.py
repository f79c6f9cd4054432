"""Log-probabilities of raw and processed logits, and these logits, row by row against a loop."""

from __future__ import annotations

import pytest
import torch
from hardpoint.sampling_params import SamplingParams

PROMPT, OUTPUT = (1, 2), (4, 5, 5)
WISHES = {
    "greedy": SamplingParams(temperature=0, logprobs=-1),
    "greedy, edited": SamplingParams(
        temperature=0, logprobs=-1, logit_bias={3: 9, 7: -2}, repetition_penalty=1.7
    ),
    "hot": SamplingParams(temperature=0.5, seed=1, logprobs=-1),
    "nobody asks": SamplingParams(temperature=1.5, seed=2, top_k=2),
    "k": SamplingParams(seed=3, top_k=3, logprobs=-1),
    "p": SamplingParams(temperature=1.3, seed=4, top_p=0.6, logprobs=-1),
    "min-p": SamplingParams(temperature=0.8, seed=5, min_p=0.2, logprobs=-1),
    "all": SamplingParams(
        temperature=1.2, seed=6, top_k=9, top_p=0.8, min_p=0.02, logprobs=-1,
        frequency_penalty=1.5, presence_penalty=-0.5, allowed_token_ids=range(0, 30, 2),
    ),
    "few": SamplingParams(seed=7, top_k=3, logprobs=5, logprob_token_ids=(0, 29)),
}  # fmt: skip


def processed(row, wish):
    """What the row's token is chosen from."""
    row = row.clone()
    for token in range(len(row)):
        if wish.allowed_token_ids is not None and token not in wish.allowed_token_ids:
            row[token] = -torch.inf
        row[token] += (wish.logit_bias or {}).get(token, 0)
        if token in PROMPT + OUTPUT:
            by = wish.repetition_penalty
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        count = OUTPUT.count(token)
        row[token] -= wish.frequency_penalty * count + wish.presence_penalty * (count > 0)
    if wish.greedy:
        return row
    row /= wish.temperature
    share = row.softmax(-1)
    row[share < wish.min_p * share.max()] = -torch.inf
    if wish.top_k > 0:
        row[row < row.sort(descending=True).values[wish.top_k - 1]] = -torch.inf
    order = row.argsort(descending=True, stable=True)
    share = row.softmax(-1)[order]
    row[order[(share.cumsum(-1) - share >= wish.top_p) & (wish.top_p < 1)]] = -torch.inf
    return row


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_each_mode_gives_what_it_says(sample, mode):
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(len(WISHES), 30, generator=generator) * 2
    wishes = {name: (wish, PROMPT, OUTPUT) for name, wish in WISHES.items()}
    sampled = sample(wishes, rows, mode=mode)
    assert sampled.tokens == sample(wishes, rows).tokens
    assert set(sampled.logprobs) == {0, 1, 2, 4, 5, 6, 7, 8}
    for row, found in sampled.logprobs.items():
        wish = list(WISHES.values())[row]
        expected = processed(rows[row], wish) if mode.startswith("processed") else rows[row]
        assert expected.isfinite()[sampled.tokens[row]]
        expected = expected.log_softmax(-1) if mode.endswith("logprobs") else expected
        ids = list(found.ids[0])
        assert found.values[0] == pytest.approx(expected[ids].tolist(), abs=1e-4)
        assert ids[0] == sampled.tokens[row]
        order = expected.argsort(descending=True, stable=True).tolist()
        assert ids[1 : found.num_best + 1] == order[: found.num_best]
        ranks = [int((expected >= expected[token]).sum()) for token in ids[: found.num_best + 1]]
        assert list(found.ranks[0]) == ranks


def test_a_row_s_processed_logits_are_the_same_alone(sample):
    rows = torch.randn(len(WISHES), 30, generator=torch.Generator().manual_seed(8))
    wishes = {name: (wish, PROMPT, OUTPUT) for name, wish in WISHES.items()}
    together = sample(wishes, rows, mode="processed_logits")
    for row, name in enumerate(WISHES):
        alone = sample(wishes, rows, order=[name], mode="processed_logits")
        assert alone.logprobs.get(0) == together.logprobs.get(row)
