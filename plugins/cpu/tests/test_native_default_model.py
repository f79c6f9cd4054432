"""The default model as a native program beside torch's way, however the work is cut up; and how far
bfloat16 weights and caches are from float32.
"""

from __future__ import annotations

import math

import pytest
from hardpoint_cpu.native.library import availability
from hardpoint_engine import LLM, SamplingParams

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=500)
PROMPTS = (
    "What is the capital of France?",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
)
DIVERGENCE = 2e-4
"""Nats, mean over a fixed text."""


def start(native: str, **keys) -> LLM:
    return LLM(
        platform="cpu", executor="uni", plugins={"cpu": {"native": native}},
        **{"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, **keys},
    )  # fmt: skip


def ids(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def test_ids_are_those_of_torch():
    with start("off") as llm:
        expected = ids(llm.generate(PROMPTS, GREEDY))
    with start("on") as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        assert ids(llm.generate(PROMPTS[1:2], GREEDY)) == expected[1:2]
    keys = {"prefill_chunk_size": 5, "max_num_batched_tokens": 16, "num_kv_blocks": 9}
    with start("on", enable_prefix_caching=False, **keys) as llm:
        assert ids(llm.generate(PROMPTS * 2, GREEDY)) == expected * 2
    with LLM(
        platform="cpu",
        executor="uni",
        plugins={"cpu": {"native": "on"}},
        max_model_len=128,
        max_num_seqs=8,
    ) as llm:  # the weights stay packed
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.slow
def test_bfloat16_is_near_float32():
    text = list(range(1000, 40000, 900))
    beginnings = [text[:end] for end in range(1, len(text), 2)]
    scores = {}
    for dtype in ("float32", "bfloat16"):
        with start("on", dtype=dtype, max_logprobs=500) as llm:
            scores[dtype] = [
                {token: entry.logprob for token, entry in each.outputs[0].logprobs[0].items()}
                for each in llm.generate(beginnings, SCORED)
            ]
    divergences, same = [], 0
    for exact, ours in zip(scores["float32"], scores["bfloat16"], strict=True):
        shared = exact.keys() & ours.keys()
        p, q = ([math.exp(each[t]) for t in shared] for each in (exact, ours))
        pairs = [*zip(p, q, strict=True), (1 - sum(p), 1 - sum(q))]  # the rest as one
        divergences.append(sum(a * math.log(a / b) for a, b in pairs))
        same += max(exact, key=exact.get) == max(ours, key=ours.get)
    mean = sum(divergences) / len(divergences)
    print(f"\n{len(beginnings)} beginnings: KL {mean:.2e}, the same best token in {same}")
    assert 0 <= mean <= DIVERGENCE
    assert same >= 0.9 * len(beginnings)
