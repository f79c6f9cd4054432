"""The default model through XLA on the CPU: ids equal to transformers and to the cpu platform.

A sequence is compared up to the first position at which the reference's two best logits differ by
less than 1e-3 and the ids differ; such stops are counted and printed, and at most one in 512
sequences may have one. This shows XLA's software stack, not a TPU: the plugin was never run on one.
"""

from __future__ import annotations

import jax
import pytest
from hardpoint_engine import LLM, SamplingParams

if jax.config.jax_num_cpu_devices < 3:
    jax.config.update("jax_num_cpu_devices", 3)

NEAR = 1e-3
SEEDED = 4
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
BUCKETS = {"request_buckets": (1, 12), "token_buckets": (64,)}


def sampled(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, seed=100 + index, max_tokens=32, ignore_eos=True
    )


def start(platform: str, **keys) -> LLM:
    keys = {
        "executor": "uni",
        "dtype": "float32",
        "max_model_len": 128,
        "num_kv_blocks": 161,
    } | keys
    return LLM(platform=platform, enable_prefix_caching=False, **keys)


def ids(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def compare(ours, expected) -> None:
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


def settings(folder, **more) -> dict[str, object]:
    return {"tpu": {"backend": "cpu", "compilation_cache": str(folder), **(BUCKETS | more)}}


@pytest.fixture(scope="module")
def tpu(tmp_path_factory):
    with start("tpu", plugins=settings(tmp_path_factory.mktemp("xla"))) as llm:
        yield llm


def test_the_ids_are_those_of_transformers_alone_and_in_a_batch(tpu, expected, prompt_ids):
    alone = [ids(tpu.generate([prompt], GREEDY))[0] for prompt in prompt_ids[:2]]
    compare(alone, expected[:2])
    compare(ids(tpu.generate(prompt_ids, GREEDY)), expected)


def test_seeded_draws_are_those_of_the_cpu_platform_alone_and_in_a_batch(tpu, prompt_ids):
    prompts, params = prompt_ids[:SEEDED], [sampled(index) for index in range(SEEDED)]
    together = ids(tpu.generate(prompts, params))
    assert ids(tpu.generate([prompts[0]], params[0])) == together[:1]
    with start("cpu") as cpu:
        assert ids(cpu.generate(prompts, params)) == together


def test_nothing_was_traced_but_the_planned_shapes(tpu):
    (report,) = tpu.collective_rpc("program_report")
    assert report.traces == report.shapes
    assert report.asked == sum(report.shapes.values())


def test_three_devices_in_one_worker_give_the_ids_of_transformers(tmp_path, expected, prompt_ids):
    few = settings(tmp_path, request_buckets=(2,))
    with start("tpu", tensor_parallel_size=3, plugins=few) as llm:
        assert llm.core.executor.world_size == 1
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = ids(llm.generate(prompt_ids[:2], params))
    compare(found, [(tokens[:12], gaps[:12]) for tokens, gaps in expected[:2]])
