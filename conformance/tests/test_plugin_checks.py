"""What the Plugin suite sees in a distribution's metadata and in its author's probe."""

from __future__ import annotations

import pytest
from attrs import evolve
from hardpoint_conformance import PluginSuite, Probe
from hardpoint_conformance.contract import ContractError


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
