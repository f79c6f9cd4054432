"""``batch_invariant``: the same bits in any batch, or a refusal that says why."""

from __future__ import annotations

import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, HardpointError, InvalidRequestError, UnsupportedError
from hardpoint_cpu.native.library import availability
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.settings import CpuSettings
from hardpoint_engine import SamplingParams
from native_models import PROMPTS, engine

available = availability()
native = pytest.mark.skipif(not available.levels, reason=available.reason)

SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


def problems(settings: CpuSettings, **keys) -> list[str]:
    config = load_config(overrides={"batch_invariant": True, **keys}, environ={})
    return [each.message for each in CpuPlatform(settings).check(config)]


def scores(results) -> list:
    return [
        [{token: entry.logprob for token, entry in row.items()} for row in each.outputs[0].logprobs]
        for each in results
    ]


@native
@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("float32", "float"), ("bfloat16", "float"), ("bfloat16", "bfloat16")],
)
def test_scores_are_the_same_bits_in_any_batch_and_chunks(checkpoint, dtype, activations):
    keys = {
        "batch_invariant": True, "dtype": dtype, "enable_prefix_caching": False,
        "activations": activations,
    }  # fmt: skip
    with engine(checkpoint("llama"), "on", **keys) as llm:
        alone = [scores(llm.generate([prompt], SCORED))[0] for prompt in PROMPTS]
        assert scores(llm.generate(PROMPTS[::-1], SCORED)) == alone[::-1]
    with engine(checkpoint("llama"), "auto", prefill_chunk_size=7, **keys) as llm:
        assert scores(llm.generate(PROMPTS, SCORED)) == alone


def test_it_is_refused_without_programs(checkpoint):
    with pytest.raises(ConfigError, match=r"batch_invariant.*native programs are off"):
        engine(checkpoint("llama"), "off", batch_invariant=True).close()
    assert not problems(CpuSettings(native="off"), batch_invariant=False)


@native
def test_sums_of_many_shards_must_have_an_order():
    assert not problems(CpuSettings(native="on"), tensor_parallel_size=4)
    for many in ({"collectives": "gloo"}, {"collectives": "auto"}):
        keys = {"tensor_parallel_size": 4, "nnodes": 1 if many["collectives"] == "gloo" else 2}
        (problem,) = problems(CpuSettings(native="on", **many), **keys)
        assert "gloo" in problem
    assert not problems(CpuSettings(native="on", collectives="gloo"), tensor_parallel_size=2)


@native
def test_a_model_without_a_program_is_refused(checkpoint):
    with pytest.raises(HardpointError, match=r"batch_invariant.*graph_mode = 'none'"):
        engine(checkpoint("llama"), "auto", batch_invariant=True, graph_mode="none").close()


@native
def test_another_runner_is_refused(checkpoint, monkeypatch):
    plain = "hardpoint_runtime.model_runner:TorchModelRunner"
    monkeypatch.setattr(CpuPlatform, "model_runner_class", plain)
    with pytest.raises(HardpointError, match="TorchModelRunner does not support batch_invariant"):
        engine(checkpoint("llama"), "auto", batch_invariant=True).close()


@native
def test_what_torch_computes_is_refused(checkpoint):
    with engine(checkpoint("llama"), "auto", batch_invariant=True) as llm:
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        with pytest.raises(InvalidRequestError, match="batch_invariant"):
            llm.generate(PROMPTS[:1], asked)
        with pytest.raises(UnsupportedError, match="embed"):
            llm.embed(PROMPTS[:1])
        assert llm.generate(PROMPTS[:1], SCORED)

        def hook(worker):
            layer = next(worker.get_model().children())
            layer.register_forward_hook(lambda *_: None)

        llm.collective_rpc(hook)
        with pytest.raises(HardpointError, match=r"batch_invariant.*has a hook"):
            llm.generate(PROMPTS[:1], SCORED)
