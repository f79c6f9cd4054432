"""Rejection of drafts: a table by hand, and what comes out is distributed as the target's own."""

from __future__ import annotations

import pytest
import torch
from hardpoint_runtime.sampling.rejection import accept_drawn, accept_greedy


def test_greedy_by_hand():
    drafts = torch.tensor([5, 6, 7, 1, 2, 9], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    best = torch.tensor([5, 6, 8, 1, 2, 4])
    bonus = torch.tensor([10, 11, 12, 13])
    assert accept_greedy(drafts, starts, best, bonus, 3).tolist() == [
        [5, 6, 8, -1],  # the last one rejected
        [11, -1, -1, -1],  # no draft
        [1, 2, 12, -1],  # all accepted
        [4, -1, -1, -1],  # the first rejected
    ]


P = torch.tensor([0.5, 0.3, 0.2, 0.0])
PROPOSALS = {
    "the same": P,
    "adverse": torch.tensor([0.05, 0.05, 0.3, 0.6]),
    "impossible": torch.tensor([0.0, 0.0, 0.0, 1.0]),
    "none": None,
}


@pytest.mark.parametrize("q", PROPOSALS.values(), ids=PROPOSALS)
def test_the_first_token_is_distributed_as_the_target(q):
    trials = 20_000
    generator = torch.Generator().manual_seed(7)
    proposed = torch.tensor([0.1, 0.4, 0.3, 0.2]) if q is None else q
    drafts = proposed.multinomial(trials, replacement=True, generator=generator).int()
    out = accept_drawn(
        drafts,
        torch.arange(trials + 1, dtype=torch.int32),
        P.expand(trials, -1),
        None if q is None else q.expand(trials, -1),
        torch.rand(trials, generator=generator, dtype=torch.float64),
        torch.randint(-(2**62), 2**62, (trials,), generator=generator),
        torch.full((trials,), 77),
        1,
    )
    counts = torch.bincount(out[:, 0], minlength=4).double()
    expected = P.double() * trials
    assert counts[3] == 0
    assert ((counts - expected)[:3] ** 2 / expected[:3]).sum() < 13.8  # 2 degrees, 1 in 1000
    accepted = (out[:, 1] == 77).double().mean()
    rate = (P * proposed).sum() if q is None else torch.minimum(P, q).sum()
    assert abs(accepted - rate) < 3 * (rate * (1 - rate) / trials) ** 0.5 + 1e-9
    assert set(out[:, 1].tolist()) <= {77, -1}
