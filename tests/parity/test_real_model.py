"""The default model in fp32: ids equal to transformers, however the work is cut up.

A sequence is compared up to the first position at which the reference's two best logits differ by
less than 1e-3 and the ids differ; such stops are counted and printed, and at most one in 512
sequences may have one.
"""

from __future__ import annotations

import pytest
from hardpoint_engine import LLM, SamplingParams

NEAR = 1e-3
SEEDED = 4
SEEDED_TOKENS = 32
USABLE_BLOCKS = 8

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def sampled(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, seed=100 + index, max_tokens=SEEDED_TOKENS,
        ignore_eos=True,
    )  # fmt: skip


def start(**keys) -> LLM:
    keys = {"platform": "cpu", "executor": "uni", "dtype": "float32", "max_model_len": 512} | keys
    return LLM(**keys)


def ids(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def compare(ours: list[list[int]], expected) -> None:
    stops = 0
    for mine, (theirs, gaps) in zip(ours, expected, strict=True):
        assert len(mine) == len(theirs)
        for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                assert gaps[position] < NEAR, f"position {position}: {a} != {b}"
                stops += 1
                break
    print(f"\n{len(ours)} sequences, {stops} comparisons stopped at a near tie")
    assert stops <= -(-len(ours) // 512)


@pytest.fixture(scope="module")
def alone(prompt_ids):
    """Each request by itself: greedy ids, then seeded ids."""
    with start(enable_prefix_caching=False) as llm:
        greedy = [ids(llm.generate([prompt], GREEDY))[0] for prompt in prompt_ids]
        seeded = [
            ids(llm.generate([prompt_ids[index]], sampled(index)))[0] for index in range(SEEDED)
        ]
    return greedy, seeded


def run_together(llm, prompt_ids, copies: int = 1):
    """All greedy requests and the seeded ones in one call."""
    prompts = prompt_ids * copies + prompt_ids[:SEEDED]
    params = [GREEDY] * (len(prompt_ids) * copies) + [sampled(index) for index in range(SEEDED)]
    results = ids(llm.generate(prompts, params))
    return results[: len(prompt_ids) * copies], results[len(prompt_ids) * copies :]


def test_alone(alone, expected):
    compare(alone[0], expected)
    assert len({tuple(tokens) for tokens in alone[1]}) == SEEDED


def test_in_a_batch_of_sixteen(alone, expected, prompt_ids):
    with start(enable_prefix_caching=False) as llm:
        greedy, seeded = run_together(llm, prompt_ids, copies=2)
    compare(greedy, expected * 2)
    assert seeded == alone[1]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefilled_in_chunks(chunk, alone, expected, prompt_ids):
    with start(enable_prefix_caching=False, prefill_chunk_size=chunk) as llm:
        greedy, seeded = run_together(llm, prompt_ids)
    compare(greedy, expected)
    assert seeded == alone[1]


def test_preempted_and_resumed_with_eight_blocks(alone, expected, prompt_ids):
    keys = {"num_kv_blocks": USABLE_BLOCKS + 1, "block_size": 16, "max_model_len": 128}
    with start(enable_prefix_caching=False, **keys) as llm:
        greedy, seeded = run_together(llm, prompt_ids)
        preemptions = llm.metrics.preemptions
    assert preemptions > 0
    compare(greedy, expected)
    assert seeded == alone[1]


def test_prefix_cache_cold_and_warm(alone, expected, prompt_ids):
    with start() as llm:
        cold, cold_seeded = run_together(llm, prompt_ids)
        before = llm.metrics.cached_tokens
        warm, warm_seeded = run_together(llm, prompt_ids)
        assert llm.metrics.cached_tokens > before
    compare(cold, expected)
    compare(warm, expected)
    assert cold_seeded == warm_seeded == alone[1]


@pytest.mark.parametrize(
    "mode",
    [
        "full_and_piecewise",
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("piecewise", marks=pytest.mark.slow),
    ],
)
def test_replayed_from_graphs(mode, alone, expected, prompt_ids):
    """Padded to few sizes, decode and prefill in graphs where the mode has any."""
    keys = {"graph_mode": mode, "graph_sizes": [8, 12, 32], "max_model_len": 160}
    with start(enable_prefix_caching=False, max_num_seqs=12, prefill_chunk_size=32, **keys) as llm:
        before = llm.collective_rpc(pieces)[0]
        greedy, seeded = run_together(llm, prompt_ids)
        steps = llm.collective_rpc(steps_by_mode)[0]
    compare(greedy, expected)
    assert seeded == alone[1]
    layers = 30
    assert set(before) <= {2 * layers + 1}
    replayed = {"FULL", "PIECEWISE"} if mode == "full_and_piecewise" else {mode.upper()}
    assert replayed <= set(steps)
    assert sum(steps[each] for each in replayed) >= 60


def pieces(worker):
    graphs = worker.model_runner.graphs.captured._graphs.values()
    return [len(each.graph.pieces) for each in graphs if hasattr(each.graph, "pieces")]


def steps_by_mode(worker):
    return {mode.name: count for mode, count in worker.model_runner.graphs.counts.steps.items()}
