"""A request with a seed gives the same on the CPU, whoever is beside it (case E5)."""

from __future__ import annotations

import pytest
from hardpoint_engine import SamplingParams

from . import small_engine

MORE = {"max_tokens": 16, "ignore_eos": True, "temperature": 1.0}
SEEDED = SamplingParams(seed=77, **MORE)
PROMPT = [3, 1, 4, 1, 5]


def tokens(llm, *neighbours: SamplingParams) -> list[int]:
    """What the seeded request gives in the midst of ``neighbours``, which have other prompts."""
    half = len(neighbours) // 2
    params = [*neighbours[:half], SEEDED, *neighbours[half:]]
    prompts = [[9 + place, *range(place, 11)] for place in range(len(params))]
    prompts[half] = PROMPT
    return llm.generate(prompts, params)[half].outputs[0].token_ids


@pytest.fixture(scope="module")
def alone() -> list[int]:
    with small_engine.start(seed=None, num_kv_blocks=200) as llm:
        return tokens(llm)


def test_alone_beside_unseeded_and_beside_seeded(alone):
    unseeded = SamplingParams(**MORE)
    others = [SamplingParams(seed=seed, **MORE) for seed in (77, 78, 79, 80)]
    with small_engine.start(seed=None, num_kv_blocks=200) as llm:
        assert tokens(llm, *[unseeded] * 5) == alone
        assert tokens(llm, *others) == alone
        assert tokens(llm, unseeded, others[1], SamplingParams(temperature=0), unseeded) == alone
        free = [llm.generate(PROMPT, unseeded)[0].outputs[0].token_ids for _ in range(2)]
        assert free[0] != free[1] != alone  # the others do draw anew
    assert len(set(alone)) > 8


def test_after_preemption(alone):
    with small_engine.start(seed=None, num_kv_blocks=17) as llm:
        answers = [tokens(llm, *[SamplingParams(**MORE)] * 5) for _ in range(3)]
        assert llm.metrics.preemptions > 3
    assert answers == [alone] * 3
