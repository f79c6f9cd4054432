"""Keys and values in int8, asked for by `kv_cache_dtype`."""

from __future__ import annotations

import pytest
from hardpoint.errors import ConfigError
from hardpoint_cpu.native.library import availability
from hardpoint_engine import LLM, SamplingParams, fidelity
from native_models import PROMPTS, engine, program_threads, tokens

available = availability()
native = pytest.mark.skipif(not available.levels, reason=available.reason)

SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
MOST_APART = 5e-3
"""Nats of divergence from float32, as of int8 weights."""


def whole(results) -> list[tuple[list[int], str]]:
    return [(list(each.outputs[0].token_ids), str(each.outputs[0].logprobs)) for each in results]


def first(results) -> list[dict[int, float]]:
    return [
        {token: entry.logprob for token, entry in each.outputs[0].logprobs[0].items()}
        for each in results
    ]


def cached(llm) -> tuple[str, int, int]:
    def ask(worker):
        layer = next(iter(worker.model_runner.kv_cache.layers.values()))
        return str(layer.key.dtype), layer.key.shape[-1], layer.key.nbytes + layer.value.nbytes

    return llm.collective_rpc(ask)[0]


@native
@pytest.mark.parametrize("family", ["heads", "phi3", "mistral"])
def test_programs_and_torch_agree(checkpoint, family):
    """To what rounding to another neighbour does: a 127th of a head's greatest number."""
    folder = checkpoint(family)
    with engine(folder, "off", kv_cache_dtype="int8") as llm:
        expected = first(llm.generate(PROMPTS, SCORED))
    with engine(folder, "off") as llm:
        exact = first(llm.generate(PROMPTS, SCORED))
        plain = cached(llm)
    with engine(folder, "on", kv_cache_dtype="int8") as llm:
        assert program_threads(llm)
        found = first(llm.generate(PROMPTS, SCORED))
        dtype, row, num_bytes = cached(llm)
        assert (dtype, row) == ("torch.int8", plain[1] + 4)
        assert num_bytes < plain[2] / 2.5

    def apart(ours, theirs):
        return max(
            abs(mine[token] - other[token])
            for mine, other in zip(ours, theirs, strict=True)
            for token in mine.keys() & other.keys()
        )

    assert apart(found, expected) < 0.05
    assert 1e-4 < apart(found, exact) < 0.5


@native
@pytest.mark.parametrize("level", available.levels)
def test_numbers_do_not_depend_on_how_the_work_is_cut_up(checkpoint, level):
    keys = {"kv_cache_dtype": "int8"}
    folder = checkpoint("heads")
    with engine(folder, "on", level, enable_prefix_caching=False, **keys) as llm:
        alone = [whole(llm.generate([prompt], SCORED))[0] for prompt in PROMPTS]
        assert whole(llm.generate(PROMPTS[::-1] * 2, SCORED)) == alone[::-1] * 2
    for more in (
        {"prefill_chunk_size": 7, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_kv_blocks": 36, "enable_prefix_caching": False},  # fewer than all need: preempted
        {"block_size": 1},
    ):
        with engine(folder, "on", level, **keys, **more) as llm:
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, more
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, more  # the cache is warm


@pytest.mark.slow
def test_shards_and_stages_have_it_too(checkpoint):
    with engine(checkpoint("heads"), "auto", kv_cache_dtype="int8") as llm:
        expected = tokens(llm.generate(PROMPTS[:2], SCORED))
    for ranks in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with engine(
            checkpoint("heads"), "auto", kv_cache_dtype="int8", executor="mp", **ranks
        ) as llm:
            assert tokens(llm.generate(PROMPTS[:2], SCORED)) == expected


def test_weights_have_no_such_type(checkpoint):
    with pytest.raises(ConfigError, match="dtype"):
        engine(checkpoint("llama"), "auto", dtype="int8").close()


def test_other_platforms_refuse_it():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*int8"):
        LLM(model="dummy", load_format="dummy", platform="dummy", kv_cache_dtype="int8").close()


@pytest.mark.slow
@native
def test_the_default_model_is_near():
    from hardpoint.config.loading import load_config

    keys = {
        "platform": "cpu", "executor": "uni", "max_model_len": 256, "kv_cache_dtype": "int8",
        "dtype": "float32", "plugins.cpu.threads": 1,
    }  # fmt: skip
    told = fidelity.measure(load_config(overrides=keys, environ={}))
    assert 0 < told["kl"] <= MOST_APART
