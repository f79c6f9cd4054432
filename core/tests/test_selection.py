"""From verdicts to one platform, from placement to one executor class."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import (
    ConfigError,
    NoPlatformError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.executor import Executor
from hardpoint.records import Placement
from hardpoint.references import UnresolvedReferenceError, resolve
from hardpoint.registry import Registry
from hardpoint.selection import (
    default_executor,
    explain_selection,
    select_executor,
    select_platform,
    verdict_table,
)


def config_of(**overrides):
    return load_config(overrides=overrides, environ={})


def choose(site, **overrides):
    config = config_of(**overrides)
    return select_platform(Registry.discover(config, path=site.path), config)


def told(caplog):
    """Return the warnings, but for that of a probe which a busy machine made slow."""
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [warning for warning in warnings if "the probe of" not in warning]


# Automatic choice.


def test_the_highest_priority_that_is_available_is_chosen_and_logged(site, caplog):
    site.platform("low", priority=0)
    site.platform("high", priority=100, reason="two units")
    site.platform("highest", priority=200, available=False, reason="no driver")
    caplog.set_level(logging.INFO)
    assert choose(site).name == "high"
    for words in ("two units", "no driver", "low", "priority 100"):
        assert words in caplog.text


def test_a_named_platform_wins_over_a_better_one(site):
    site.platform("low", priority=0)
    site.platform("high", priority=100)
    assert choose(site, platform="low").name == "low"
    assert choose(site).name == "high"


def test_a_tie_lists_every_candidate_and_the_key(site):
    site.platform("one", priority=5, reason="first reason")
    site.platform("two", priority=5, reason="second reason")
    site.platform("three", priority=1)
    with pytest.raises(PluginConflictError) as caught:
        choose(site)
    for words in ("one", "two", "three", "first reason", "second reason", "`platform`"):
        assert words in str(caught.value)
    assert choose(site, plugins={"disable": ["two"]}).name == "one"


def test_a_platform_of_negative_priority_is_chosen_by_name_only(site):
    site.platform("fake", priority=-1, reason="computes nothing")
    with pytest.raises(NoPlatformError) as caught:
        choose(site)
    assert "only by name" in caught.value.table
    assert choose(site, platform="fake").name == "fake"


def test_no_platform_error_has_every_candidates_verdict(site):
    site.platform("one", available=False, reason="the management library is missing")
    site.platform("two", probe="raise OSError('libtwo.so')")
    site.platform("three", api=(9, 0))
    site.platform("four")
    with pytest.raises(NoPlatformError) as caught:
        choose(site, plugins={"disable": ["four"]})
    rows = {line.split()[0]: line for line in caught.value.table.splitlines()}
    assert "the management library is missing" in rows["one"]
    assert "OSError: libtwo.so" in rows["two"]
    assert "plugin API 9.0, core API 2.0" in rows["three"]
    assert "plugins.disable" in rows["four"]
    assert caught.value.table in str(caught.value)
    assert caught.value.exit_code == 2


def test_no_platform_installed_at_all(site):
    with pytest.raises(NoPlatformError, match="pip install"):
        choose(site)


def test_explain_selection_probes_each_once(site):
    packages = [site.platform("one", priority=3), site.platform("two", available=False)]
    config = config_of()
    registry = Registry.discover(config, path=site.path)
    table = dict(explain_selection(registry, config))
    assert (table["one"].available, table["one"].priority) == (True, 3)
    assert (table["two"].available, table["two"].reason) == (False, "as told")
    assert explain_selection(registry, config) == tuple(table.items())
    select_platform(registry, config)
    assert [resolve(f"{package}.platform:ThePlatform").probes for package in packages] == [1, 1]
    assert "priority 3" in verdict_table(tuple(table.items()))


def test_two_distributions_that_claim_a_platform_stop_the_automatic_choice(site):
    site.platform("acme", distribution="first")
    site.platform("acme", distribution="second")
    site.platform("good")
    with pytest.raises(PluginConflictError, match=r"first 1.0.*second 1.0"):
        choose(site)
    assert choose(site, plugins={"provider": {"acme": "first"}}, platform="acme").name == "acme"


# A plugin that fails: told when it was not asked for, raised when it was.


@pytest.mark.parametrize("place", ["plugin", "platform", "probe"])
def test_a_broken_platform_warns_once_and_raises_when_named(site, caplog, place):
    site.platform("good")
    line = "raise ImportError('libacme.so.2: cannot open')"
    package = site.platform("acme", version="7.7", priority=100, probe=line)
    if place != "probe":
        site.module(f"{package}.{place}", line)
    assert choose(site).name == "good"
    (warning,) = told(caplog)
    for fact in ("hp-acme", "7.7", "acme = hp_acme.plugin", "libacme.so.2: cannot open"):
        assert fact in warning
    caplog.clear()
    config = config_of(platform="acme")
    registry = Registry.discover(config, path=site.path)
    causes = []
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"hp-acme 7\.7") as caught:
            select_platform(registry, config)
        causes.append(caught.value.__cause__)
    assert isinstance(causes[0], ImportError)
    assert causes[0] is causes[1]
    assert not told(caplog)


def test_a_named_platform_that_is_not_usable_raises_its_reason(site):
    site.platform("acme", available=False, reason="no unit answers on the bus")
    site.platform("good")
    with pytest.raises(NoPlatformError, match="no unit answers on the bus") as caught:
        choose(site, platform="acme")
    assert "good" not in caught.value.table


@pytest.mark.parametrize("probe", ["return None", "return True", "raise SystemExit(1)"])
def test_a_probe_must_return_a_verdict(site, probe):
    site.platform("acme", probe=probe)
    with pytest.raises(PluginLoadError, match="probe raised"):
        choose(site, platform="acme")


def test_strict_makes_a_broken_candidate_an_error(site):
    site.platform("good")
    site.platform("acme", probe="raise OSError('x')")
    with pytest.raises(PluginLoadError):
        choose(site, plugins={"strict": True})


def test_only_the_named_platform_is_imported(site):
    site.platform("good")
    site.platform("other", source="raise SystemExit")
    choose(site, platform="good")
    assert "hp_good.plugin" in sys.modules
    assert "hp_other.plugin" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"), [("god", "Did you mean 'good'"), ("xyz", "the distribution that offers it")]
)
def test_an_unknown_name_never_falls_back(site, name, words):
    site.platform("good")
    with pytest.raises(PluginNotFoundError, match=words):
        choose(site, platform=name)


def test_a_platform_that_is_named_and_disabled_is_an_error(site):
    site.platform("acme")
    site.platform("good")
    with pytest.raises(PluginError, match=r"'acme'.*disabled.*plugins\.disable"):
        choose(site, platform="acme", plugins={"disable": ["acme"]})


# Fresh processes.


@pytest.mark.parametrize("order", ["hardpoint, hp_acme.plugin", "hp_acme.plugin, hardpoint"])
def test_both_import_orders_choose_the_same(site, order):
    site.platform("acme", priority=5)
    site.platform("good")
    code = f"""
        import {order}, importlib, sys
        importlib.import_module("hp_acme.plugin"); importlib.import_module("hardpoint")
        from hardpoint.config import Config
        from hardpoint.registry import Registry
        from hardpoint.selection import select_platform
        registry = Registry.discover(Config(), path={site.path!r})
        print(select_platform(registry, Config()).name, len(registry.resolved()))
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False,
        cwd=site.folder, env={"PYTHONPATH": str(site.folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["acme", "1"]


def test_choosing_initialises_no_device(site):
    """A spy in place of a vendor's runtime counts what anybody does with it."""
    site.module("spy", "initialised = []\ndef init():\n    initialised.append(1)\n")
    package = site.platform("acme", more="def check(self, config): return ()")
    site.module(f"{package}.worker", "import spy\nspy.init()\n")
    config = config_of()
    registry = Registry.discover(config, path=site.path)
    platform = select_platform(registry, config)
    registry.configure(config, platform)
    platform.check(config)
    assert registry.worker_class(config, platform) == "hp_acme.worker:TheWorker"
    assert f"{package}.worker" not in sys.modules
    assert resolve("spy:initialised") == []
    resolve("hp_acme.worker:spy")
    assert resolve("spy:initialised") == [1]


OFFER = """
@hookimpl
def hardpoint_drafters(): return []
@hookimpl
def hardpoint_models(): return []
"""


def test_an_offer_that_nothing_takes_up_is_warned_of(site, caplog):
    site.platform("acme", source=OFFER)
    site.plugin("extension", "tracer", source=OFFER, distribution="hp-tracer-two")
    site.plugin("extension", "off", source=OFFER)
    choose(site, plugins={"disable": ["off"]})
    said = [each for each in caplog.records if "nothing uses" in each.message]
    assert [each.message.partition(":")[0] for each in said] == [
        "hardpoint_drafters of hp-acme 1.0",
        "hardpoint_drafters of hp-tracer-two 1.0",
    ]
    assert {each.levelname for each in said} == {"WARNING"}


# Executors.

EXECUTOR = """
from hardpoint.executor import Executor

class Threads(Executor):
    uses_ray = True
    def start_workers(self): pass
    def call_workers(self, call): pass
    def probe_health(self, timeout): return []
    def stop_workers(self, deadline): pass

class Holder:
    Inner = Threads

text = "no class"
"""


def executor_site(site, name="threads", more=""):
    package = site.plugin("executor", name, f'executor="hp_{name}.executor:Threads", {more}')
    site.module(f"{package}.executor", EXECUTOR)
    return package


def executor_of(site, value, **platform):
    site.platform("acme", **platform)
    config = config_of(executor=value)
    registry = Registry.discover(config, path=site.path)
    platform = select_platform(registry, config)
    return select_executor(registry, config, platform), registry


def test_a_name_a_class_and_references_give_the_same_class(site):
    executor_site(site)
    site.platform("acme")
    found = set()
    values = ["threads", "hp_threads.executor:Threads", "hp_threads.executor.Threads"]
    values += ["hp_threads.executor:Holder.Inner"]
    for value in values:
        config = config_of(executor=value)
        registry = Registry.discover(config, path=site.path)
        found.add(select_executor(registry, config, select_platform(registry, config)))
    (executor,) = found
    config = config_of(executor=executor)
    registry = Registry.discover(config, path=site.path)
    assert select_executor(registry, config, select_platform(registry, config)) is executor
    assert issubclass(executor, Executor)
    assert executor.uses_ray


@pytest.mark.parametrize("value", ["hp_threads.executor:text", "json.JSONDecoder", "json:loads"])
def test_what_is_no_executor_class_is_a_type_error(site, value):
    executor_site(site)
    with pytest.raises(TypeError, match=r"not a subclass of hardpoint\.executor\.Executor"):
        executor_of(site, value)


def test_an_incomplete_executor_is_a_type_error_that_says_what_it_lacks(site):
    with pytest.raises(TypeError, match="lacks call_workers, probe_health"):
        executor_of(site, Executor)


@pytest.mark.parametrize("value", [dict, 3, 2.5])
def test_a_value_that_is_no_executor_at_all(site, value):
    from attrs import evolve

    site.platform("acme")
    config = config_of()
    registry = Registry.discover(config, path=site.path)
    platform = select_platform(registry, config)
    with pytest.raises(TypeError, match="not a subclass"):
        select_executor(registry, evolve(config, executor=value), platform)


@pytest.mark.parametrize(
    "value", ["no.such.module", "no:Such", "json:Nothing", "a b:c", ":x", "json:"]
)
def test_a_path_to_nothing_is_an_import_error_that_names_it(site, value):
    with pytest.raises(ImportError) as caught:
        executor_of(site, value)
    assert isinstance(caught.value, UnresolvedReferenceError)
    assert repr(value) in str(caught.value)


def test_an_unknown_executor_is_not_found(site):
    executor_site(site)
    with pytest.raises(PluginNotFoundError, match="Did you mean 'threads'"):
        executor_of(site, "thread")


def test_a_platforms_name_is_no_executor(site):
    with pytest.raises(PluginNotFoundError, match="'acme' is a platform"):
        executor_of(site, "acme")


def test_an_executor_whose_probe_says_no_raises_its_reason(site):
    verdict = 'probe=lambda: Verdict(available=False, reason="its library is missing")'
    executor_site(site, more=verdict)
    with pytest.raises(PluginError, match="its library is missing"):
        executor_of(site, "threads")


def test_an_executor_that_cannot_be_imported_raises_the_original(site):
    package = site.plugin("executor", "threads", 'executor="hp_threads.executor:Threads"')
    site.module(f"{package}.executor", "raise OSError('no ring')")
    with pytest.raises(PluginLoadError, match=r"hp-threads 1\.0") as caught:
        executor_of(site, "threads")
    assert isinstance(caught.value.__cause__, OSError)


def test_only_the_executor_that_is_used_is_imported(site):
    executor_site(site, "uni")
    executor_site(site, "ray")
    _, registry = executor_of(site, None)
    assert "hp_uni.plugin" in sys.modules
    assert "hp_ray.plugin" not in sys.modules
    assert [plugin.name for plugin in registry.used("executor")] == ["uni"]


@pytest.mark.parametrize(
    ("workers", "hosts", "own", "expected"),
    [
        (1, 1, None, "uni"),
        (2, 1, None, "mp"),
        (8, 1, None, "mp"),
        (2, 2, None, "ray"),
        (8, 2, None, "ray"),
        (1, 1, "mp", "mp"),
        (4, 2, "uni", "uni"),
        (1, 1, "acme_launcher", "acme_launcher"),
    ],
)
def test_the_default_executor(site, workers, hosts, own, expected):
    placement = Placement(num_workers=workers, num_hosts=hosts, default_executor=own)
    assert default_executor(placement) == expected
    executor_site(site, expected)
    chosen, _ = executor_of(site, None, workers=workers, hosts=hosts, default=own)
    assert chosen.__module__ == f"hp_{expected}.executor"


def test_an_explicit_executor_is_never_overridden(site):
    executor_site(site, "uni")
    executor_site(site, "mp")
    chosen, _ = executor_of(site, "uni", workers=8, default="mp")
    assert chosen.__module__ == "hp_uni.executor"


def test_a_default_executor_that_is_not_installed_says_how_to_get_it(site):
    executor_site(site, "uni")
    with pytest.raises(PluginNotFoundError, match="pip install hardpoint-multiproc") as caught:
        executor_of(site, None, workers=2)
    for words in (
        "platform = 'acme': needs 2 workers on one host",
        "(installed: uni)",
        "key executor",
    ):
        assert words in str(caught.value)


def parallel(site, support):
    site.platform(
        "acme",
        workers=2,
        more="from hardpoint.capabilities import YES\n"
        f"capabilities = {{**capabilities, Capability.TENSOR_PARALLEL: {support}}}",
    )
    config = config_of(tensor_parallel_size=2)
    registry = Registry.discover(config, path=site.path)
    return select_executor(registry, config, select_platform(registry, config))


def test_an_executor_that_nobody_named_is_explained_by_the_key_that_wants_it(site):
    wanted = r"^tensor_parallel_size = 2 \(.+\): needs 2 workers on one host, and .*'mp'"
    with pytest.raises(PluginNotFoundError, match=wanted):
        parallel(site, "YES")


def test_what_the_platform_cannot_do_comes_before_an_executor_for_it(site):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 2 .*does not support") as caught:
        parallel(site, "NOT_YET")
    assert "hardpoint-multiproc" not in str(caught.value)
