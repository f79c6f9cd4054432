"""Experts by the formula, token by token."""

from __future__ import annotations

import pytest
import torch
from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.recording import record
from hardpoint_runtime.mixture import experts
from hardpoint_runtime.operations import gelu_tanh_and_mul, silu_and_mul

TOKENS, HIDDEN, INNER, COUNT, TAKEN = 7, 8, 6, 5, 2


def arguments(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    chosen = torch.stack(
        [torch.randperm(COUNT - 1, generator=generator)[:TAKEN] for _ in range(TOKENS)]
    )  # the last expert is nobody's
    return (
        normal(TOKENS, HIDDEN),
        normal(COUNT, 2 * INNER, HIDDEN),
        normal(COUNT, HIDDEN, INNER),
        chosen,
        normal(TOKENS, TAKEN).softmax(-1),
    )


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("activate", [silu_and_mul, gelu_tanh_and_mul])
def test_each_token_has_the_sum_of_its_experts(activate, fixed):
    x, gate_up, down, chosen, weights = arguments()
    found = experts(x, gate_up, down, chosen, weights, activate=activate, fixed=fixed)
    for token in range(TOKENS):
        expected = torch.zeros(HIDDEN)
        for place in range(TAKEN):
            expert = chosen[token, place]
            inner = activate((gate_up[expert] @ x[token])[None])[0]
            expected += weights[token, place] * (down[expert] @ inner)
        torch.testing.assert_close(found[token], expected, atol=1e-5, rtol=1e-5)


def test_only_fixed_work_can_be_recorded():
    def run(seed, fixed):
        values = arguments(seed)
        given = (*values[:1], *FIRST[1:3], *values[3:])
        return record(lambda: experts(*given, activate=silu_and_mul, fixed=fixed))

    with pytest.raises(GraphCaptureError):
        run(1, fixed=False)
    names = [[entry.name for entry in run(seed, fixed=True).entries] for seed in (1, 2)]
    assert names[0] == names[1]
    assert len(names[0]) > COUNT


FIRST = arguments()
