"""The check before any worker starts: every problem at once, each with its way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve, frozen
from hardpoint.capabilities import NEVER, NOT_YET, YES, Capability
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config import Config, load_config
from hardpoint.config.checks import NEEDS
from hardpoint.config.keys import replace
from hardpoint.config.resolution import check, fill_defaults
from hardpoint.errors import ConfigError, PluginError
from hardpoint.executor import Executor
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Problem, Verdict

MODEL = ModelDescription(
    path=Path("model"),
    format="safetensors",
    architecture="LlamaForCausalLM",
    num_layers=4,
    hidden_size=96,
    intermediate_size=64,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=256,
    context_length=512,
    stored_dtype="float32",
)


class Acme(Platform):
    """A platform that can do what each test wants."""

    name = "acme"
    worker_class = "acme:Worker"
    model_runner_class = "acme:Runner"
    capabilities = dict.fromkeys(Capability, YES)

    def __init__(self, *, limits=None, workers=1, output_rank=0, problems=(), lacks=()):
        super().__init__()
        self._limits = {"dtypes": ("float32", "bfloat16"), "default_dtype": "float32"}
        self._limits |= {"async_scheduling": True} | (limits or {})
        self._placement = Placement(num_workers=workers, output_rank=output_rank)
        self._problems = problems
        self.capabilities = {**type(self).capabilities, **dict.fromkeys(lacks, NOT_YET)}

    def probe(self):
        return Verdict(available=True, reason="pretended")

    def limits(self, config):
        return Limits(**self._limits)

    def placement(self, config):
        return self._placement

    def check(self, config):
        if isinstance(self._problems, Exception):
            raise self._problems
        return self._problems


@frozen
class Extensions:
    """Stands for the registry."""

    found: tuple = ()
    policies: tuple = ()

    def offers(self, hook, platform_name):
        assert (hook, platform_name) == ("hardpoint_graph_policies", "acme")
        return dict.fromkeys(self.policies)

    def has(self, kind, name):
        return kind == "extension" and name in self.found

    def names(self, kind):
        return self.found


class Staged(Executor):
    supports_pp = True


class Single(Executor):
    pass


def load(platform, **values) -> Config:
    config = evolve(load_config(overrides=values, environ={}), description=MODEL)
    return fill_defaults(config, platform)


def problems_of(platform=None, *, executor=None, extensions=(), **values) -> list[Problem]:
    platform = platform or Acme()
    config = load(platform, **values)
    with pytest.raises(ConfigError) as caught:
        check(config, Extensions(extensions), platform, executor)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def test_a_good_configuration_passes():
    platform = Acme(workers=6)
    check(load(platform), Extensions(), platform)
    many = {"tensor_parallel_size": 3, "pipeline_parallel_size": 2, "devices": list("abcdef")}
    check(load(platform, **many), Extensions(), platform, Staged)


@pytest.mark.parametrize(
    ("values", "limits", "words"),
    [
        ({"dtype": "bfloat16"}, {"dtypes": ("float32",)}, "It offers float32."),
        ({"kv_cache_dtype": "bfloat16"}, {"dtypes": ("float32",)}, "It offers float32."),
        ({"block_size": 8}, {"block_sizes": (16, 32)}, "It offers 16, 32."),
        ({"max_num_seqs": 9}, {"max_num_seqs": 8}, "at most 8"),
        ({"max_num_batched_tokens": 9}, {"max_num_batched_tokens": 8}, "at most 8"),
        ({"prefill_chunk_size": 24}, {"chunk_multiple": 16}, "Use 16."),
        ({"max_num_batched_tokens": 8}, {"chunk_multiple": 16}, "Use 16 or more."),
        ({"num_kv_blocks": 2}, {"reserved_blocks": 2}, "at least 3"),
        ({"max_model_len": 513}, {}, "context is 512 tokens"),
        ({"tensor_parallel_size": 4}, {}, "9 query and 3 key-value heads"),
        ({"tensor_parallel_size": 12}, {}, "9 query and 3 key-value heads"),
        ({"pipeline_parallel_size": 5}, {}, "4 layers"),
        ({"async_scheduling": True}, {"async_scheduling": False}, "with this configuration"),
        ({"nnodes": 2}, {}, "only 1 workers"),
        ({"devices": ["0", "0"]}, {}, "twice"),
        ({"devices": []}, {}, "need 1 devices"),
    ],
)
def test_an_explicit_value_that_the_platform_cannot_honour_is_a_problem(values, limits, words):
    (path,) = values
    found = problems_of(Acme(limits=limits), **values)
    (problem,) = [each for each in found if each.key == path]
    assert words in str(problem)
    assert problem.value == (tuple(values[path]) if path == "devices" else values[path])
    assert problem.origin == "Python"
    assert problem.way_out


@pytest.mark.parametrize("tensor", [1, 2, 3, 6, 9])
def test_head_splits_that_work_are_let_through(tensor):
    platform = Acme(workers=tensor)
    check(load(platform, tensor_parallel_size=tensor), Extensions(), platform)


@pytest.mark.parametrize(("path", "harmless", "capability"), NEEDS)
def test_a_feature_needs_its_capability(path, harmless, capability):
    values = {bool: True, tuple: ("acme:Processor",), str: "processed_logits"}
    value = values.get(type(harmless), 2)
    platform = Acme(workers=2, lacks=[capability])
    (problem,) = problems_of(platform, executor=Staged, **{path: value})
    assert problem.key == path
    assert f"platform 'acme' does not support {capability.value} (not yet)" in problem.message
    assert "another platform" in problem.way_out
    check(load(platform, **{path: harmless}), Extensions(), platform)


def test_processors_that_would_see_drafts_are_refused():
    platform = Acme()
    more = {"num_speculative_tokens": 2, "logits_processors": ["acme:Processor"]}
    (problem,) = problems_of(platform, **more)
    assert problem.key == "logits_processors"
    assert "num_speculative_tokens = 0" in problem.way_out


def test_never_is_told_apart_from_not_yet():
    platform = Acme()
    platform.capabilities = {**platform.capabilities, Capability.LORA: NEVER}
    (problem,) = problems_of(platform, max_loras=1)
    assert "(never)" in problem.message


def test_without_chunked_prefill_the_budget_must_hold_a_prompt_and_chunks_are_refused():
    platform = Acme(lacks=[Capability.CHUNKED_PREFILL])
    found = problems_of(platform, max_num_batched_tokens=100, prefill_chunk_size=16)
    assert [each.key for each in found] == ["prefill_chunk_size", "max_num_batched_tokens"]
    assert "512" in found[1].message
    check(load(platform, max_num_batched_tokens=100, max_model_len=100), Extensions(), platform)


def test_two_ways_to_size_the_cache_are_one_too_many():
    (problem,) = problems_of(num_kv_blocks=8, kv_cache_memory_bytes=1 << 20)
    assert "kv_cache_memory_bytes is set too" in problem.message


def test_a_head_size_that_no_kernel_has_is_the_models_problem():
    (problem,) = problems_of(Acme(limits={"head_sizes": (32, 128)}), model="some/folder")
    assert (problem.key, problem.value) == ("model", "some/folder")
    assert "64 elements" in problem.message
    assert "32, 128" in problem.message


def test_pipeline_stages_need_an_executor_that_spreads_them():
    platform = Acme(workers=2)
    (problem,) = problems_of(platform, executor=Single, pipeline_parallel_size=2)
    assert "executor Single" in problem.message
    check(load(platform, pipeline_parallel_size=2), Extensions(), platform, Staged)


def test_a_step_more_needs_an_executor_that_takes_it():
    platform = Acme()
    (problem,) = problems_of(platform, executor=Single, async_scheduling=True)
    assert "executor Single" in problem.message

    class Eager(Single):
        supports_async_scheduling = True

    check(load(platform, async_scheduling=True), Extensions(), platform, Eager)


@pytest.mark.parametrize("path", ["worker", "model_runner"])
def test_an_extension_that_replaces_a_class_must_be_installed(path):
    (problem,) = problems_of(extensions=("tracer",), **{path: "trcer"})
    assert "Did you mean tracer?" in str(problem)
    (problem,) = problems_of(**{path: "tracer"})
    assert "None is installed" in str(problem)
    platform = Acme()
    check(load(platform, **{path: "tracer"}), Extensions(("tracer",)), platform)


def test_graphs_that_are_asked_for_need_the_capability():
    platform = Acme(lacks=[Capability.GRAPHS])
    (problem,) = problems_of(platform, graph_mode="full")
    assert problem.key == "graph_mode"
    assert "platform 'acme' does not support graphs (not yet)" in problem.message
    assert "Set graph_mode = none" in problem.way_out
    for harmless in (None, "none"):
        check(load(platform, graph_mode=harmless), Extensions(), platform)
    check(load(Acme(), graph_mode="full"), Extensions(), Acme())


def test_a_policy_of_graphs_must_be_offered():
    platform = Acme()
    config = load(platform, graph_policy="threes")
    check(config, Extensions(policies=("threes",)), platform)
    with pytest.raises(ConfigError, match=r"graph_policy.*Did you mean thirds\?"):
        check(load(platform, graph_policy="thirs"), Extensions(policies=("thirds",)), platform)
    (problem,) = problems_of(graph_policy="threes")
    assert "No plugin offers any" in str(problem)


def test_general_and_platform_problems_come_in_one_error_with_origins():
    own = Problem(key="seed", value=3, message="no seeds here.")
    foreign = Problem(key="plugins.acme.x", value=1, message="no.", origin="known already")
    platform = Acme(problems=(own, foreign), lacks=[Capability.LORA])
    found = problems_of(platform, seed=3, max_loras=1, block_size=5, max_model_len=1000)
    assert {each.key: each.origin for each in found} == {
        "max_loras": "Python",
        "block_size": "Python",
        "max_model_len": "Python",
        "seed": "Python",
        "plugins.acme.x": "known already",
    }


def test_a_platform_whose_check_raises_is_named_with_its_own_error():
    platform = Acme(problems=ZeroDivisionError("oh"))
    with pytest.raises(PluginError, match=r"'acme'.*ZeroDivisionError: oh") as caught:
        check(load(platform), Extensions(), platform)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("workers", "output_rank"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_a_placement_without_workers_or_output_is_the_platforms_error(workers, output_rank):
    platform = Acme(workers=workers, output_rank=output_rank)
    with pytest.raises(PluginError, match=f"places {workers} workers"):
        check(load(platform), Extensions(), platform)


def test_a_clash_that_an_extension_caused_can_be_ended_by_disabling_it():
    config = replace(load_config(environ={}), {"block_size": 24}, "plugin nc: it likes 24")
    for found, end in ((("nc",), r", or name 'nc' in plugins\.disable\."), ((), r"\.")):
        with pytest.raises(ConfigError, match=rf"It offers 16{end}$"):
            check(fill_defaults(config, Acme()), Extensions(found), Acme())
