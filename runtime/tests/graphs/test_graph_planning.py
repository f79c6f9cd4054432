"""From a configuration to a plan: explicit modes, defaults, a device's sizes, a plugin's policy."""

from __future__ import annotations

import logging

import pytest
from attrs import evolve
from hardpoint.config.keys import replace
from hardpoint.config.schema import Config
from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.records import Offer
from hardpoint.references import WrongClassError
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.planning import plan_graphs
from hardpoint_runtime.graphs.policy import DispatchPolicy
from hardpoint_runtime.graphs.resolution import AttentionSupport


class Eights(HostDeviceOps):
    def buckets(self, largest):
        return tuple(range(8, largest + 1, 8))


class Registry:
    def offers(self, hook, platform_name):
        assert (hook, platform_name) == ("hardpoint_graph_policies", "acme")
        return {
            "whole": Offer(name="whole", reference=f"{__name__}:Whole"),
            "wrong": Offer(name="wrong", reference=f"{__name__}:Eights"),
        }


class Whole(DispatchPolicy):
    """One size for all."""

    def sizes(self, sizes):
        return sizes[-1:]


def plan(values, *, device=None, support=AttentionSupport.ALWAYS, **more):
    budget = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = replace(Config(), budget | values, "test")
    return plan_graphs(
        config, Registry(), "acme", device or HostDeviceOps(), support=support, **more
    )


def sizes(made):
    return sorted({graph.key.num_tokens for graph in made.graphs})


def test_unset_is_the_default_of_whoever_asks():
    assert plan({}).mode is GraphMode.NONE
    assert not plan({}).graphs
    made = plan({}, default=GraphMode.FULL_AND_PIECEWISE)
    assert made.mode is GraphMode.FULL_AND_PIECEWISE
    assert sizes(made) == [1, 2, 4, 8, 16]
    assert not plan({"graph_mode": "none"}, default=GraphMode.FULL).graphs


def test_a_default_steps_down_with_a_warning_and_an_explicit_mode_does_not(caplog):
    with caplog.at_level(logging.WARNING):
        made = plan({}, default=GraphMode.FULL_AND_PIECEWISE, splittable=False)
    assert made.mode is GraphMode.FULL_DECODE_ONLY
    (record,) = caplog.records
    assert record.getMessage() == (
        "graph_mode full_and_piecewise: nothing runs in PIECEWISE: the model cannot be split at "
        "its attention layers"
    )
    with pytest.raises(ConfigError, match="Set graph_mode = 'full_decode_only'"):
        plan({"graph_mode": "full_and_piecewise"}, splittable=False)
    with pytest.raises(ConfigError, match="Set graph_mode = 'full_and_piecewise'"):
        plan({"graph_mode": "full"}, support=AttentionSupport.UNIFORM_BATCH)
    with pytest.raises(ConfigError, match="tea time"):
        plan({"graph_mode": "full"}, forbidden={GraphMode.FULL: "tea time"})


def test_a_mode_that_a_plugin_chose_may_step_down():
    config = replace(Config(), {"graph_mode": "full"}, "plugin acme: faster")
    made = plan_graphs(
        evolve(config), Registry(), "acme", HostDeviceOps(), support=AttentionSupport.NEVER
    )
    assert made.mode is GraphMode.PIECEWISE


def test_sizes_come_from_the_user_then_the_device_then_the_ladder():
    assert sizes(plan({"graph_mode": "full"}, device=Eights())) == [8, 16]
    assert sizes(plan({"graph_mode": "full", "graph_sizes": [5, 3]}, device=Eights())) == [3, 5]
    with pytest.raises(ConfigError, match="graph_sizes"):
        plan({"graph_mode": "full", "graph_sizes": [65]})


def test_no_sizes_at_all_contradict_a_mode_that_was_asked_for():
    with pytest.raises(ConfigError, match=r"'full', and graph_sizes = \[\] .*graph_mode = 'none'"):
        plan({"graph_mode": "full", "graph_sizes": []})
    assert plan({"graph_sizes": []}, default=GraphMode.FULL).mode is GraphMode.NONE


def test_drafts_and_adapters_shape_the_plan():
    made = plan({"graph_mode": "full", "num_speculative_tokens": 2, "max_loras": 2})
    assert made.rules.uniform_query == 3
    assert made.rules.lora_cases == (0, 1, 2, 3)
    assert all(size % 3 == 0 for size in sizes(made))
    made = plan({"graph_mode": "full", "max_loras": 2, "graph_per_lora_count": False})
    assert {graph.key.active_loras for graph in made.graphs} == {3}


def test_the_policy_is_the_one_that_is_named():
    assert sizes(plan({"graph_mode": "full", "graph_policy": "whole"})) == [16]
    with pytest.raises(PluginNotFoundError, match="graph_policy = 'half'"):
        plan({"graph_mode": "full", "graph_policy": "half"})
    with pytest.raises(WrongClassError, match="graph_policy = 'wrong'"):
        plan({"graph_mode": "full", "graph_policy": "wrong"})
