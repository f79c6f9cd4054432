from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from hardpoint.capabilities import Capability, Support
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config.schema import Config, GraphConfig
from hardpoint.platform import RequestView
from hardpoint.sampling_params import SamplingParams
from hardpoint_cpu.native import library
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.settings import CpuSettings


def config_with(stored: str) -> Config:
    description = ModelDescription(
        path=Path("x"), format="safetensors", architecture="LlamaForCausalLM", num_layers=1,
        hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_size=8, vocab_size=8,
        context_length=8, stored_dtype=stored,
    )  # fmt: skip
    return Config(description=description)


class Elsewhere(CpuPlatform):
    """A platform whose kernel files lie in a folder of the test."""

    def __init__(self, root, settings=None):
        super().__init__(settings)
        self.root = root


def test_the_probe_says_what_there_is(v2):
    root = v2(
        {
            "sys/fs/cgroup/user/job/memory.max": str(4 << 30),
            "sys/fs/cgroup/user/job/cpu.max": "50000 100000",
        }
    )
    verdict = Elsewhere(root).probe()
    assert (verdict.available, verdict.priority) == (True, 0)
    assert "(a quota leaves time for 0.5)" in verdict.reason
    assert "4.0 GiB of memory as set by control group" in verdict.reason
    assert verdict.devices[0].memory_bytes == 4 << 30


def test_without_torch_it_is_not_usable(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    verdict = CpuPlatform().probe()
    assert (verdict.available, verdict.reason) == (False, "the package torch is not installed")


def test_describing_imports_no_torch_and_no_array_library():
    code = (
        "import sys\n"
        "from hardpoint.config.schema import Config\n"
        "from hardpoint.platform import RequestView\n"
        "from hardpoint.sampling_params import SamplingParams\n"
        "import hardpoint_cpu.plugin as plugin\n"
        "plugin.hardpoint_platform(), plugin.hardpoint_operations()\n"
        "light = set(sys.modules)\n"
        "from hardpoint_cpu.platform import CpuPlatform\n"
        "p = CpuPlatform(); c = Config()\n"
        "p.probe(), p.limits(c), p.placement(c), p.check(c), p.fork_safe(), p.context(c)\n"
        "p.check_request(RequestView(req_id='a', num_prompt_tokens=1, sampling=SamplingParams()))\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "mine = {'hardpoint_cpu', 'hardpoint_cpu.plugin'}\n"
        "print(heavy, {m for m in light if m.startswith('hardpoint_')} - mine)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() set()"


@pytest.mark.parametrize(
    ("stored", "flags", "dtype"),
    [
        ("packed", "avx2 amx_bf16", "float32"),
        ("float32", "avx2 amx_bf16", "float32"),
        ("float16", "avx2", "float32"),
        ("bfloat16", "avx2 fma", "float32"),
        ("bfloat16", "avx2 avx512_bf16", "bfloat16"),
        ("bfloat16", "asimd bf16 i8mm", "bfloat16"),
    ],
)
def test_the_default_type_is_the_stored_one_where_it_is_native(kernel, stored, flags, dtype):
    root = kernel({"proc/cpuinfo": f"processor : 0\nflags : {flags}\n"})
    through_torch = CpuSettings(native="off")
    limits = Elsewhere(root, through_torch).limits(config_with(stored))
    assert (limits.default_dtype, limits.dtypes) == (dtype, ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("packed", "float32")]
)
def test_a_program_computes_with_bfloat16_on_any_processor(kernel, monkeypatch, stored, dtype):
    root = kernel({"proc/cpuinfo": "processor : 0\nflags : avx2\n"})
    auto = Elsewhere(root, CpuSettings(native="auto"))
    monkeypatch.setattr(library, "availability", lambda: library.Availability(("portable",), ""))
    config = config_with(stored)
    assert auto.limits(config).default_dtype == dtype
    for without in (
        evolve(config, graph=GraphConfig(graph_mode="none")),
        evolve(config, graph=GraphConfig(graph_sizes=(1,))),
        evolve(config, description=evolve(config.description, architecture="OlmoForCausalLM")),
    ):
        assert auto.limits(without).default_dtype == "float32"
    monkeypatch.setattr(library, "availability", lambda: library.Availability((), "no compiler"))
    assert auto.limits(config).default_dtype == "float32"


def test_more_threads_than_cores_is_found_before_anything_starts():
    platform = CpuPlatform(CpuSettings(threads=4096))
    (problem,) = platform.check(Config())
    assert problem.key == "plugins.cpu.threads"
    assert "more threads than" in problem.message


def test_every_sampling_parameter_is_honoured():
    sampling = SamplingParams(
        temperature=0.3, top_k=5, logprobs=2, prompt_logprobs=1, bad_words=["a"], n=2,
        structured_outputs={"regex": "a"}, extra_args={"mine": 1},
    )  # fmt: skip
    view = RequestView(req_id="a", num_prompt_tokens=3, sampling=sampling)
    assert CpuPlatform().check_request(view) is None


def test_every_capability_is_declared():
    assert set(CpuPlatform.capabilities) == set(Capability)
    assert CpuPlatform().support(Capability.SPECULATIVE) is Support.NOT_YET
    assert CpuPlatform().support(Capability.CHUNKED_PREFILL) is Support.YES


def test_a_cpu_worker_in_this_process_keeps_no_other_from_being_forked(monkeypatch):
    """What is forked is a nursery, in which no worker has lived (tests/parallel does it)."""
    monkeypatch.setitem(sys.modules, "hardpoint_cpu.worker", object())
    assert CpuPlatform().fork_safe().safe


def test_it_is_found_and_chosen_through_its_entry_point():
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry
    from hardpoint.selection import select_platform

    config = load_config(overrides={"platform": "cpu", "plugins.cpu.threads": 1}, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    assert isinstance(platform, CpuPlatform)
    assert platform.options == CpuSettings(threads=1)
    offers = registry.offers("hardpoint_operations", "cpu")
    assert offers["linear"].reference == "hardpoint_runtime.host_linear:linear"
