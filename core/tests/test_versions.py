"""Contract numbers: who is served, who is refused with which way out, and how hooks, arguments and
capabilities come and go without breaking whoever was built for another number.
"""

from __future__ import annotations

import types
import warnings

import hardpoint
import pluggy
import pytest
from hardpoint import hooks, hookspecs
from hardpoint.capabilities import NOT_YET, SINCE, Capability
from hardpoint.config.loading import load_config
from hardpoint.deprecated import Deprecation, HardpointDeprecationWarning
from hardpoint.errors import IncompatiblePluginError, PluginLoadError, UnsupportedError
from hardpoint.registry import Registry
from hardpoint.selection import select_platform

SPEC = pluggy.HookspecMarker(hookspecs.PROJECT)


def discover(site):
    return Registry.discover(path=site.path)


@pytest.fixture
def later_core(monkeypatch):
    """Return a function that makes this core one of another number, with other hooks."""

    def become(api, **other):
        monkeypatch.setattr(hardpoint, "API", api)
        module = types.ModuleType("hookspecs")
        vars(module).update(vars(hookspecs) | other)
        monkeypatch.setattr(hooks, "hookspecs", module)

    return become


@pytest.mark.parametrize("core", [(2, 0), (2, 3), (3, 0), (3, 1), (9, 9)])
def test_every_core_serves_its_own_number_and_the_one_before(site, later_core, core):
    later_core(core)
    served = {(core[0], 0), core, (core[0] - 1, 0), (core[0] - 1, 99)}
    refused = {(core[0], core[1] + 1), (core[0] + 1, 0), (core[0] - 2, 99), (0, 0)}
    for number, api in enumerate(sorted(served | refused)):
        site.plugin("extension", f"acme{number}", api=api)
    registry = discover(site)
    for number, api in enumerate(sorted(served | refused)):
        state = registry.attempt("extension", f"acme{number}").state
        assert state == ("loaded" if api in served else "refused"), api


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ((2, 1), "a newer contract: plugin API 2.1, core API 2.0"),
        ((3, 0), "a newer contract: plugin API 3.0, core API 2.0"),
        ((0, 9), "an older contract: plugin API 0.9, core API 2.0"),
    ],
)
def test_a_refusal_has_both_numbers_and_the_way_out(site, api, words):
    site.plugin("extension", "acme", api=api)
    with pytest.raises(IncompatiblePluginError) as caught:
        discover(site).load("extension", "acme")
    text = str(caught.value)
    assert words in text
    assert "hp-acme 1.0" in text
    newer = "Install a newer hardpoint, or a hp-acme built for API 2"
    older = "Install a hp-acme built for API 2, or an older hardpoint"
    assert text.endswith(newer if api > (2, 0) else older)


# Hooks and arguments that come.


@SPEC
def hardpoint_configure(config, platform, reason=None):
    """As a later contract may have it: with more arguments."""


def test_an_implementation_with_fewer_arguments_runs_on_a_core_that_gives_more(site, later_core):
    """A plugin built for the number before, on a core that gives its hook one argument more."""
    later_core((3, 0), hardpoint_configure=hardpoint_configure)
    taken = "@hookimpl\ndef hardpoint_configure({}):\n    return {!r}"
    for name, arguments in {"none": "", "one": "config", "both": "platform, config"}.items():
        site.plugin("extension", name, api=(2, 0), source=taken.format(arguments, name))
    table = hooks.HookTable()
    for name in ("none", "one", "both"):
        plugin = discover(site).load("extension", name)
        table.register(("extension", name), plugin.module)
        answer = table.call(
            ("extension", name), "hardpoint_configure", {"config": 1, "platform": 2}
        )
        assert answer == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("config, konfig", "hook 'hardpoint_configure' has no argument 'konfig'. Did you mean"),
        ("config, later", "has no argument 'later'. It has config, of which an implementation may"),
    ],
)
def test_an_argument_that_the_hook_does_not_have_is_named(site, arguments, words):
    source = f"@hookimpl\ndef hardpoint_configure({arguments}):\n    return []"
    site.plugin("extension", "acme", source=source)
    with pytest.raises(PluginLoadError) as caught:
        discover(site).load("extension", "acme")
    assert words in str(caught.value)
    assert "hp-acme 1.0" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_argument_with_a_default_is_the_implementations_own(site):
    source = "@hookimpl\ndef hardpoint_worker_env(rank, later='x'):\n    return {'L': later}"
    site.plugin("extension", "acme", source=source)
    assert discover(site).worker_env(load_config(environ={}), 0) == {"L": "x"}


def test_a_hook_of_a_newer_contract_may_be_marked_as_optional(site):
    source = "@hookimpl(optionalhook=True)\ndef hardpoint_of_tomorrow(moon):\n    return moon"
    site.plugin("extension", "acme", source=source)
    assert discover(site).load("extension", "acme").state == "loaded"
    site.plugin("extension", "plain", source=source.replace("(optionalhook=True)", ""))
    with pytest.raises(PluginLoadError, match=r"no hook 'hardpoint_of_tomorrow'.*optionalhook"):
        discover(site).load("extension", "plain")


# Arguments that go.

OLD = Deprecation(what="argument 'level'", instead="'tags'", since=(2, 1), removal=(4, 0))


def test_who_uses_a_deprecated_argument_is_warned_at_its_own_line_and_served(site, later_core):
    @SPEC(warn_on_impl_args={"level": OLD.warning})
    def hardpoint_worker_env(config, rank, level):
        """As a later contract may have it: an argument is about to go."""

    later_core((3, 0), hardpoint_worker_env=hardpoint_worker_env)
    source = "@hookimpl\ndef hardpoint_worker_env({}):\n    return {{'L': '1'}}"
    site.plugin("extension", "old", api=(2, 0), source=source.format("level, rank"))
    site.plugin("extension", "new", api=(3, 0), source=source.format("rank"))
    registry = discover(site)
    with pytest.warns(HardpointDeprecationWarning) as caught:
        registry.use("extension", "old")
    (warning,) = caught
    assert str(warning.message).endswith("goes with API 4.0; use 'tags' instead")
    assert warning.filename == registry.load("extension", "old").module.__file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.use("extension", "old")
        registry.use("extension", "new")
    assert registry.implementers("hardpoint_worker_env") == ("old", "new")
    assert {OLD.expired(api) for api in ((3, 0), (4, 0))} == {False, True}


# Capabilities that come.


def test_each_capability_has_a_number_that_this_contract_has_reached():
    assert set(SINCE) == set(Capability)
    assert all(since <= hardpoint.API for since in SINCE.values())


def test_a_capability_newer_than_the_plugin_counts_as_not_yet(site, later_core, monkeypatch):
    later_core((2, 1))
    monkeypatch.setitem(SINCE, Capability.GRAPHS, (2, 1))
    rest = "capabilities = {c: NOT_YET for c in Capability if c is not Capability.GRAPHS}"
    site.platform("before", api=(2, 0), more=rest)
    platform = discover(site).platform("before")
    assert platform.support(Capability.GRAPHS) is NOT_YET
    with pytest.raises(UnsupportedError, match="graphs"):
        platform.require(Capability.GRAPHS)
    site.platform("since", api=(2, 1), more=rest)
    with pytest.raises(PluginLoadError, match="declares nothing for GRAPHS"):
        discover(site).platform("since")


# All of it at once.


@pytest.mark.parametrize(("api", "served"), [((1, 7), True), ((2, 0), True), ((3, 0), False)])
def test_a_platform_built_for_each_number(site, caplog, api, served):
    """Served, it is selected; refused, the others go on, and one warning says why."""
    site.platform(
        "acme", api=api, priority=50, more="capabilities = dict.fromkeys(Capability, YES)"
    )
    site.platform("host")
    registry = discover(site)
    platform = select_platform(registry, load_config(environ={}))
    assert platform.name == ("acme" if served else "host")
    assert len([line for line in caplog.messages if "newer contract" in line]) == (not served)
