"""What the driver is told: limits, placement, checks; and that it imports neither JAX nor torch."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from hardpoint.capabilities import Capability, Support
from hardpoint.config.schema import Config, ParallelConfig, SchedulerConfig
from hardpoint.errors import ConfigError, RemoteError
from hardpoint.platform import RequestView
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine import LLM
from hardpoint_tpu.detection import Surroundings
from hardpoint_tpu.platform import LABEL, TpuPlatform
from hardpoint_tpu.settings import TpuSettings


def platform(**settings) -> TpuPlatform:
    return TpuPlatform(TpuSettings(**({"backend": "cpu"} | settings)))


def test_every_capability_has_an_answer():
    assert set(TpuPlatform.capabilities) == set(Capability)
    assert platform().support(Capability.TENSOR_PARALLEL) is Support.YES
    assert platform().support(Capability.LORA) is Support.NOT_YET


def test_limits_are_the_largest_buckets():
    limits = platform().limits(Config())
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (64, 1024)
    assert (limits.default_max_num_seqs, limits.default_max_num_batched_tokens) == (16, 512)
    assert (limits.mixed_batches, limits.chunk_multiple) == (False, 16)
    assert limits.default_dtype == "float32"
    on_tpu = platform(backend="tpu").limits(Config())
    assert (on_tpu.max_num_seqs, on_tpu.default_dtype) == (256, "bfloat16")
    few = platform(request_buckets=(4, 2), token_buckets=(16, 32)).limits(Config())
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (4, 32)
    assert (few.default_max_num_seqs, few.default_max_num_batched_tokens) == (4, 32)


def test_only_buckets_that_a_step_can_need_are_compiled():
    config = Config(scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=100))
    assert platform().buckets(config).rows == (1, 2, 4, 8)
    assert platform().buckets(config).tokens == (16, 32, 64, 128)
    assert platform(backend="tpu").buckets(config).rows == (8,)


def test_one_worker_owns_all_devices():
    config = Config(parallel=ParallelConfig(tensor_parallel_size=3))
    placed = platform(backend="tpu").placement(config)
    assert (placed.num_workers, placed.devices_per_worker) == (1, 3)
    assert placed.resources_per_worker == {"TPU": 3.0}
    assert placed.default_executor is None
    assert platform().assigned_devices({"TPU": ("2", "3")}) == ("2", "3")


def test_a_process_is_never_forked_for_it():
    safety = platform().fork_safe()
    assert not safety.safe
    assert "threads" in safety.reason
    assert TpuPlatform.preload == ()


def test_tpus_are_exclusive_and_the_cpu_is_not():
    assert platform(backend="tpu").exclusive
    assert not platform().exclusive


def test_with_libtpu_beside_it_the_cpu_keeps_jax_from_the_chips():
    made = platform()
    assert made.environment(Config(), made.placement(Config())) == {}
    made.surroundings = Surroundings(installed=lambda name: True)
    assert made.environment(Config(), made.placement(Config())) == {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token_buckets": (16, 100)}, "plugins.tpu.token_buckets = .*100 tokens is no multiple"),
        ({"request_buckets": (0, 4)}, "plugins.tpu.request_buckets = .*at least 1"),
    ],
)
def test_wrong_buckets_are_problems(settings, words):
    import re

    problems = platform(**settings).check(Config())
    assert re.search(words, "; ".join(map(str, problems)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"architecture": "QwenForCausalLM"}, "knows no QwenForCausalLM; it runs LlamaForCausalLM"),
        ({"hf_config": {"hidden_act": "gelu"}}, "activation 'gelu'"),
        ({"hf_config": {"rope_scaling": {"rope_type": "yarn"}}}, "rotary scaling 'yarn'"),
    ],
)
def test_a_model_that_cannot_be_run_is_a_problem_before_anything_starts(description, more, words):
    config = Config(description=description(**more))
    (problem,) = platform().check(config)
    assert problem.key == "model"
    assert words in problem.message


def test_a_good_configuration_has_no_problem(make_config):
    assert platform().check(make_config(tensor_parallel_size=2)) == ()


def test_heads_that_cannot_be_spread_are_one_problem():
    with pytest.raises(ConfigError, match="the model has 4 query and 2 key-value heads") as caught:
        LLM(
            load_format="dummy", platform="tpu", executor="uni", tensor_parallel_size=3,
            plugins={"tpu": {"backend": "cpu"}},
        )  # fmt: skip
    assert len(caught.value.problems) == 1


def test_what_is_not_honoured_is_refused():
    params = SamplingParams(extra_args={"a": 1})
    view = RequestView(req_id="a", num_prompt_tokens=3, sampling=params)
    assert platform().check_request(view).key == "extra_args"


def test_every_parameter_of_the_sampler_is_taken():
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, presence_penalty=1, frequency_penalty=1,
        repetition_penalty=1.1, seed=1, min_tokens=2, stop_token_ids=[1], logprobs=3,
        logprob_token_ids=[2], bad_words=["x"], logit_bias={1: 2}, allowed_token_ids=[1, 2],
    )  # fmt: skip
    view = RequestView(req_id="a", num_prompt_tokens=3, sampling=params)
    assert platform().check_request(view) is None


DRIVER = """
import sys
from hardpoint.registry import Registry
from hardpoint.config import load_config
from hardpoint.selection import explain_selection, select_platform
import hardpoint_tpu.platform, hardpoint_tpu.detection, hardpoint_tpu.shape
registry = Registry.discover(load_config())
table = dict(explain_selection(registry, load_config()))
print(table["tpu"].available, sorted({"jax", "jaxlib", "torch", "numpy"} & set(sys.modules)))
"""


def test_the_driver_imports_no_jax_to_choose_a_platform():
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split(maxsplit=1) == ["False", "[]\n"], done.stderr


WORKER = """
import importlib, pkgutil, sys, hardpoint_tpu
for module in pkgutil.walk_packages(hardpoint_tpu.__path__, "hardpoint_tpu."):
    importlib.import_module(module.name)
print(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "hardpoint_runtime", "jax"}))
"""


def test_no_module_imports_torch_or_the_torch_toolkit():
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "['jax']", done.stderr


def test_it_is_never_chosen_unasked_and_without_a_chip_not_by_name(tmp_path):
    from hardpoint.config import load_config
    from hardpoint.errors import PluginError
    from hardpoint.registry import Registry
    from hardpoint.selection import select_platform

    config = load_config(overrides={"plugins": {"tpu": {"backend": "cpu"}}})
    assert select_platform(Registry.discover(config), config).name == "cpu"
    config = load_config(overrides={"platform": "tpu"})
    with pytest.raises(PluginError, match="libtpu is not installed"):
        select_platform(Registry.discover(config), config)
    config = load_config(overrides={"platform": "tpu", "plugins": {"tpu": {"backend": "cpu"}}})
    registry = Registry.discover(config)
    assert select_platform(registry, config).name == "tpu"
    assert LABEL in registry.verdict("platform", "tpu").reason


def test_more_devices_than_there_are_is_an_error_with_a_way_out():
    assert len(jax.devices("cpu")) == 3  # so JAX runs, and takes no more
    with pytest.raises(RemoteError, match="XLA_FLAGS=--xla_force_host_platform_device_count=4"):
        LLM(
            load_format="dummy", platform="tpu", executor="uni", tensor_parallel_size=4,
            plugins={"tpu": {"backend": "cpu"}},
        )  # fmt: skip
