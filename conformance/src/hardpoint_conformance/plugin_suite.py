"""The Plugin suite: what discovery, loading and validation may count on."""

from __future__ import annotations

from typing import ClassVar

from hardpoint import discovery
from hardpoint.registry import Registry

from hardpoint_conformance.contract import expect_equal
from hardpoint_conformance.suite import Suite


class PluginSuite(Suite):
    """Entry points, light import, versions, settings, probe. For platforms and executors."""

    contract: ClassVar[str] = "plugin"
    kinds: ClassVar[tuple[str, ...]] = ("platform", "executor")

    def test_the_entry_point_leads_to_a_record_of_its_name(self) -> None:
        """Row D: the entry-point name is the configuration name."""
        plugin = self.subject.plugin
        expect_equal(
            plugin.record.name, plugin.name, "a record's name equals its entry point's",
            where=type(plugin.record),
            do="Give the record and the entry point in pyproject.toml one name.",
        )  # fmt: skip

    def test_only_one_distribution_claims_the_name(self) -> None:
        """Two distributions that claim one name are an error of the installation."""
        plugin = self.subject.plugin
        claims = [
            each.provider
            for each in Registry.discover().plugins
            if (each.kind, each.name) == (plugin.kind, plugin.name)
        ]
        expect_equal(
            len(claims), 1, f"one distribution provides {plugin.kind} {plugin.name!r}",
            where=discovery.judge,
            do=f"Uninstall all but one of {', '.join(claims)}.",
        )  # fmt: skip
