"""What the suites see in a distribution's metadata, in its author's probe, and in odd limits."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, Probe
from hardpoint_conformance.contract import ContractError
from hardpoint_conformance.dummy_probe import DummyProbe


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        ((), "Requires-Dist: nothing"),
        (("hardpoint-runtime>=0.1,<0.2",), "Requires-Dist: hardpoint-runtime"),
        (("hardpoint>=0.1",), "an upper end"),
        (("hardpoint>=9,<10",), "has this core in it"),
    ],
)
def test_a_distribution_without_a_range_of_cores_is_told(requires, words):
    suite = PluginSuite.of("dummy")
    suite.subject._plugin = evolve(suite.subject.plugin, requires=requires)
    with pytest.raises(ContractError, match=words):
        suite().test_the_distribution_says_which_hardpoint_it_needs()


def test_a_method_of_a_probe_that_is_misspelt_is_named():
    class Blind(Probe):
        @staticmethod
        def held_byte(worker):
            return 0

    with pytest.raises(ContractError, match=r"Blind.held_byte \(is held_bytes meant\?\)"):
        PluginSuite.of("dummy", probe=Blind)().test_a_method_of_its_probe_is_one_that_is_asked()
    PluginSuite.of("dummy")().test_a_method_of_its_probe_is_one_that_is_asked()


class Forgetful(DummyProbe):
    """Counts the weights alone."""

    @staticmethod
    def held_bytes(worker):
        return worker.get_model_runner().load_model().weight_bytes


class Empty(DummyProbe):
    """Counts nothing, and does not say so."""

    @staticmethod
    def held_bytes(worker):
        return 0


@pytest.mark.parametrize("probe", [Forgetful, Empty])
def test_a_probe_that_counts_too_little_is_told(probe):
    suite = PlatformSuite.of("dummy", probe=probe, settings={"plugins.dummy.memory_bytes": 1 << 30})
    try:
        with pytest.raises(ContractError, match="held_bytes counts weights and KV cache"):
            suite().test_memory_is_back_to_the_baseline_after_every_life()
    finally:
        suite.subject.remove()


@pytest.mark.parametrize(
    ("suite", "test"),
    [
        (PlatformSuite, "test_the_largest_and_the_smallest_block_size_run"),
        (ModelRunnerSuite, "test_prompts_that_end_about_the_end_of_a_block"),
        (ModelRunnerSuite, "test_a_request_resumes_in_its_old_blocks_in_another_order"),
        (ModelRunnerSuite, "test_a_prefix_in_the_cache_is_used_as_it_is"),
        (ModelRunnerSuite, "test_a_copied_block_is_the_block"),
    ],
)
def test_a_platform_may_have_large_blocks_alone(suite, test):
    bound = suite.of("dummy", settings={"plugins.dummy.block_sizes": [128, 256]})
    try:
        getattr(bound(), test)()
    finally:
        bound.subject.remove()
