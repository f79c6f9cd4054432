"""The registry: loading on demand, isolation, offers, and what workers get."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
from attrs import evolve
from hardpoint.config.loading import load_config
from hardpoint.errors import (
    ConfigError,
    IncompatiblePluginError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform


def config_of(**overrides):
    return load_config(overrides=overrides, environ={})


def discover(site, **overrides):
    return Registry.discover(config_of(**overrides), path=site.path)


def warnings_in(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def state(registry, name):
    return next(plugin.state for plugin in registry.plugins if plugin.name == name)


# Isolation.


def test_a_failing_extension_gets_one_warning_and_stays_in_the_list(site, caplog):
    site.plugin("extension", "broken", source="raise ImportError('libbroken.so.1')", version="4.2")
    site.plugin("extension", "good")
    registry = discover(site)
    for _ in range(3):
        assert [plugin.name for plugin in registry.extensions()] == ["good"]
        registry.attempt("extension", "broken")
        registry.announce("hardpoint_worker_started", worker=None)
    (warning,) = warnings_in(caplog)
    for fact in ("hp-broken", "4.2", "broken = hp_broken.plugin", "ImportError", "libbroken.so.1"):
        assert fact in warning.getMessage()
    assert state(registry, "broken") == "failed"


def test_asked_for_by_name_it_raises_the_same_original_exception_each_time(site, caplog):
    site.plugin("extension", "broken", source="raise ValueError('original')")
    registry = discover(site)
    causes = []
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"hp-broken 1\.0") as caught:
            registry.load("extension", "broken")
        causes.append(caught.value.__cause__)
    assert isinstance(causes[0], ValueError)
    assert causes[0] is causes[1]
    assert not warnings_in(caplog)


def test_the_same_exception_whoever_asked_first(site):
    site.plugin("extension", "broken", source="raise ValueError('original')")
    registry = discover(site)
    registry.extensions()
    error = next(p.error for p in registry.plugins if p.name == "broken")
    with pytest.raises(PluginLoadError) as caught:
        registry.load("extension", "broken")
    assert caught.value.__cause__ is error


def test_a_refused_plugin_raises_its_refusal_each_time(site):
    site.plugin("extension", "old", api=(0, 1))
    registry = discover(site)
    for _ in range(2):
        with pytest.raises(IncompatiblePluginError, match=r"plugin API 0\.1, core API 2\.0"):
            registry.load("extension", "old")
    assert state(registry, "old") == "refused"


def test_strict_makes_it_an_error(site):
    site.plugin("extension", "broken", source="raise ValueError('original')")
    registry = discover(site, plugins={"strict": True})
    with pytest.raises(PluginLoadError) as caught:
        registry.extensions()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_broken_class_module_is_the_platforms_failure(site):
    package = site.platform("acme")
    site.module(f"{package}.platform", "import no_such_library")
    registry = discover(site)
    causes = set()
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="no_such_library") as caught:
            registry.platform("acme")
        causes.add(caught.value.__cause__)
    (cause,) = causes
    assert isinstance(cause, ModuleNotFoundError)
    assert state(registry, "acme") == "failed"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("name = 'other'", "'other'"),
        ("capabilities = {}", "TENSOR_PARALLEL"),
        ("limits = property(1)\nplacement = None\ndef __init__(self, s): raise OSError('x')", "x"),
    ],
)
def test_a_platform_of_the_wrong_shape_is_refused(site, more, words):
    site.platform("acme", more=more)
    with pytest.raises(PluginLoadError, match=words):
        discover(site).platform("acme")


def test_a_platform_that_leaves_attributes_out_is_told_them_all(site):
    package = site.platform("acme")
    site.module(
        f"{package}.platform",
        "from hardpoint.platform import Platform\n"
        "class ThePlatform(Platform):\n"
        "    def probe(self): ...\n"
        "    def limits(self, config): ...\n"
        "    def placement(self, config): ...\n",
    )
    lacks = "lacks name, worker_class, model_runner_class, capabilities"
    with pytest.raises(PluginLoadError, match=rf"hp-acme 1\.0.*{lacks}"):
        discover(site).platform("acme")


def test_a_platform_for_an_older_contract_need_not_declare_later_capabilities(site):
    site.platform("acme", api=(1, 4), more="capabilities = {}")
    assert discover(site).platform("acme").name == "acme"


def test_what_is_no_platform_is_refused(site):
    site.plugin("platform", "acme", 'platform="json:JSONDecoder"')
    with pytest.raises(PluginLoadError, match="not a subclass") as caught:
        discover(site).platform("acme")
    assert isinstance(caught.value.__cause__, TypeError)


# Hooks are checked at registration.


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@hookimpl\ndef hardpoint_configur(config):\n    return []", "hardpoint_configure"),
        ("@hookimpl\ndef my_function():\n    return []", "my_function"),
        ("@hookimpl\ndef hardpoint_configure(konfig):\n    return []", "konfig"),
        ("def hardpoint_configure(config):\n    return []", "@hookimpl"),
    ],
)
def test_misspelt_hooks_fail_at_registration(site, source, words):
    site.plugin("extension", "acme", source=source)
    site.plugin("extension", "good")
    registry = discover(site)
    with pytest.raises(PluginLoadError, match=words):
        registry.load("extension", "acme")
    assert [plugin.name for plugin in registry.extensions()] == ["good"]
    assert registry.implementers("hardpoint_configure") == ()


def test_a_hook_may_take_fewer_arguments(site):
    site.plugin(
        "extension",
        "acme",
        source="""
        @hookimpl
        def hardpoint_configure():
            return [Change(key="seed", old=None, new=1, reason="because")]
        """,
    )
    site.platform("one")
    registry = discover(site)
    config = config_of()
    platform = select_platform(registry, config)
    ((name, change),) = registry.configure(config, platform)
    assert (name, change.new) == ("acme", 1)


# Loading.


def test_loading_happens_once_whatever_the_number_of_threads(site):
    site.plugin(
        "extension",
        "acme",
        source="""
        import builtins
        builtins.hp_loads = getattr(builtins, "hp_loads", 0) + 1
        """,
    )
    registry = discover(site)
    together = threading.Barrier(8)

    def work():
        together.wait()
        registry.extensions()
        registry.load("extension", "acme")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    import builtins

    assert builtins.hp_loads == 1
    del builtins.hp_loads


def test_a_disabled_plugin_is_never_imported_and_refused_by_name(site):
    package = site.plugin("extension", "acme", source="raise SystemExit")
    registry = discover(site, plugins={"disable": ["acme"]})
    assert registry.extensions() == ()
    with pytest.raises(PluginError, match=r"disabled.*plugins\.disable"):
        registry.load("extension", "acme")
    assert f"{package}.plugin" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acne", "Did you mean 'acme'"),
        ("hp-acme", "Did you mean 'acme'"),
        ("hp_acme.plugin", "Did you mean 'acme'"),
        ("zzz", "Installed: acme"),
        ("run", "'run' is a command"),
    ],
)
def test_unknown_names_in_disable_are_errors(site, name, words):
    site.plugin("extension", "acme")
    site.add("cmd", entry_points={"command": {"run": "cmd:run"}})
    config = load_config(environ={"HARDPOINT_DISABLE": f"acme,{name}"})
    with pytest.raises(ConfigError) as caught:
        Registry.discover(config, path=site.path)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("plugins.disable", name)
    assert words in str(caught.value)
    assert "HARDPOINT_DISABLE" in str(caught.value)


def test_every_unknown_plugin_name_is_told_at_once(site):
    site.plugin("extension", "acme")
    plugins = {
        "disable": ["nope"],
        "provider": {"nobody": "x", "acme": "elsewhere"},
        "acmee": {"level": 1},
    }
    with pytest.raises(ConfigError) as caught:
        discover(site, plugins=plugins)
    assert {problem.key for problem in caught.value.problems} == {
        "plugins.disable",
        "plugins.provider.nobody",
        "plugins.provider.acme",
        "plugins.acmee",
    }
    assert "hp-acme 1.0" in str(caught.value)


def test_a_diagnosis_goes_on_with_names_that_no_plugin_has(site, caplog):
    site.platform("acme")
    config = load_config(
        overrides={"plugins": {"disable": ["acmee"], "acmf": {"key": 1}}}, environ={}
    )
    registry = Registry.discover(config, path=site.path, diagnosis=True)
    assert registry.verdict("platform", "acme").available
    for words in ("plugins.disable = 'acmee'", "plugins.acmf", "Did you mean 'acme'"):
        assert words in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_not_found_has_close_matches_what_is_installed_and_how_to_install(site):
    site.platform("acme")
    registry = discover(site)
    with pytest.raises(PluginNotFoundError) as caught:
        registry.load("platform", "acne")
    for words in ("'acne'", "Did you mean 'acme'", "acme (hp-acme 1.0)", "pip install the"):
        assert words in str(caught.value)
    with pytest.raises(PluginNotFoundError, match=r"distribution that offers it") as caught:
        registry.load("platform", "quantum_x")
    assert "hardpoint-quantum" not in str(caught.value)
    with pytest.raises(PluginNotFoundError, match="pip install hardpoint-multiproc"):
        registry.load("executor", "mp")
    with pytest.raises(PluginNotFoundError, match="'acme' is a platform"):
        registry.load("executor", "acme")


def test_a_conflict_is_an_error_however_it_is_met(site):
    site.plugin("extension", "acme", distribution="first")
    site.plugin("extension", "acme", distribution="second")
    registry = discover(site)
    for action in (registry.extensions, lambda: registry.load("extension", "acme")):
        with pytest.raises(PluginConflictError, match=r"first 1.0.*second 1.0.*plugins.provider"):
            action()
    chosen = discover(site, plugins={"provider": {"acme": "second"}})
    assert [plugin.distribution for plugin in chosen.extensions()] == ["second"]
    assert discover(site, plugins={"disable": ["acme"]}).extensions() == ()


def test_two_registries_share_nothing(site, caplog):
    site.plugin("extension", "broken", source="raise ValueError('x')")
    first, second = discover(site), discover(site, plugins={"disable": ["broken"]})
    first.extensions()
    assert state(first, "broken") == "failed"
    assert state(second, "broken") == "disabled"
    third = discover(site)
    third.extensions()
    assert len(warnings_in(caplog)) == 2


# Whose hooks count.

LOUD = """
@hookimpl
def hardpoint_configure(config):
    return [Change(key="seed", old=None, new=1, reason="loud")]
@hookimpl
def hardpoint_operations():
    return [Operation(name="norm", reference="x:y")]
"""


def test_platforms_that_were_only_candidates_are_never_asked(site):
    site.platform("best", priority=9)
    site.platform("other", source=LOUD)
    registry = discover(site)
    platform = select_platform(registry, config_of())
    assert state(registry, "other") == "loaded"
    assert registry.configure(config_of(), platform) == ()
    assert registry.offers("hardpoint_operations", "best") == {}
    assert [each.name for each in registry.resolved()] == ["best"]


def test_order_is_platform_executor_extensions(site):
    announce = "@hookimpl\ndef hardpoint_worker_started(worker): worker.append({!r})"
    site.plugin("extension", "b", source=announce.format("b"))
    site.plugin("extension", "a", source=announce.format("a"))
    site.platform("acme", source=announce.format("acme"))
    registry = discover(site)
    registry.extensions()
    select_platform(registry, config_of())
    assert registry.implementers("hardpoint_worker_started") == ("acme", "a", "b")
    heard = []
    registry.announce("hardpoint_worker_started", worker=heard)
    assert heard == ["acme", "a", "b"]


def test_one_module_that_serves_two_plugins_counts_once(site):
    both = """
        @hookimpl
        def hardpoint_executor():
            return ExecutorRecord(name="acme", api=(2, 0), executor="hp_acme.executor:Threads")
        @hookimpl
        def hardpoint_worker_started(worker):
            worker.append(1)
        """
    site.platform("acme", source=both)
    info = site.folder / "hp_acme-1.0.dist-info" / "entry_points.txt"
    info.write_text(info.read_text() + "[hardpoint.executors]\nacme = hp_acme.plugin\n")
    site.module("hp_acme.executor", EXECUTOR)
    registry = discover(site, executor="acme")
    config = config_of(executor="acme")
    platform = select_platform(registry, config)
    select_executor(registry, config, platform)
    heard = []
    registry.announce("hardpoint_worker_started", worker=heard)
    assert heard == [1]
    assert {(each.kind, each.name) for each in registry.resolved()} == {
        ("platform", "acme"),
        ("executor", "acme"),
    }


EXECUTOR = """
from hardpoint.executor import Executor

class Threads(Executor):
    def start_workers(self): pass
    def call_workers(self, call): pass
    def probe_health(self, timeout): return []
    def stop_workers(self, deadline): pass
"""


# Offers.


def offering(site, name, *offers, kind="extension", hook="hardpoint_models"):
    lines = ", ".join(offers)
    source = f"@hookimpl\ndef {hook}():\n    return [{lines}]\n"
    getattr(site, "platform" if kind == "platform" else "plugin")(
        *((name,) if kind == "platform" else (kind, name)), source=source
    )


def test_the_platforms_own_offer_wins_then_any(site):
    offering(
        site,
        "ext",
        "Offer(name='M', reference='ext:any')",
        "Offer(name='N', reference='ext:n')",
        "Offer(name='O', reference='ext:o', platform='other')",
    )
    offering(
        site, "acme", "Offer(name='M', reference='acme:own', platform='acme')", kind="platform"
    )
    registry = discover(site)
    select_platform(registry, config_of())
    offers = registry.offers("hardpoint_models", "acme")
    assert {name: offer.reference for name, offer in offers.items()} == {
        "M": "acme:own",
        "N": "ext:n",
    }
    assert set(registry.offers("hardpoint_models", "other")) == {"M", "N", "O"}


def test_a_tie_is_an_error_that_names_both(site):
    offering(site, "one", "Offer(name='M', reference='one:m')")
    offering(site, "two", "Offer(name='M', reference='two:m')")
    registry = discover(site)
    with pytest.raises(PluginConflictError) as caught:
        registry.offers("hardpoint_models", "acme")
    for words in ("'M'", "hp-one 1.0", "hp-two 1.0", "one:m", "two:m", "plugins.disable"):
        assert words in str(caught.value)
    assert set(discover(site, plugins={"disable": ["two"]}).offers("hardpoint_models", "x")) == {
        "M"
    }


def test_what_loses_to_the_platforms_own_is_no_tie(site):
    for name in ("one", "two"):
        offering(site, name, f"Offer(name='M', reference='{name}:m')")
    own = "Offer(name='M', reference='acme:own', platform='acme')"
    offering(site, "acme", own, kind="platform")
    registry = discover(site)
    select_platform(registry, config_of())
    assert registry.offers("hardpoint_models", "acme")["M"].reference == "acme:own"
    with pytest.raises(PluginConflictError, match=r"one:m.*two:m"):
        registry.offers("hardpoint_models", "other")


def test_operations_that_do_not_support_what_is_asked_are_passed_over(site):
    supports = "lambda d: None if d['head_size'] == 64 else 'head size ' + str(d['head_size'])"
    offering(
        site,
        "one",
        f"Operation(name='attention', reference='one:a', supports={supports})",
        hook="hardpoint_operations",
    )
    offering(
        site,
        "two",
        "Operation(name='attention', reference='two:a', supports=lambda d: 'never')",
        hook="hardpoint_operations",
    )
    registry = discover(site)
    offers = registry.offers("hardpoint_operations", "acme", {"head_size": 64})
    assert offers["attention"].reference == "one:a"
    assert registry.offers("hardpoint_operations", "acme", {"head_size": 80}) == {}


def test_an_extension_that_raises_in_a_hook_is_set_aside_with_one_warning(site, caplog):
    source = "@hookimpl\ndef hardpoint_models():\n    raise RuntimeError('in the hook')"
    site.plugin("extension", "broken", source=source)
    offering(site, "good", "Offer(name='M', reference='good:m')")
    registry = discover(site)
    for _ in range(2):
        assert set(registry.offers("hardpoint_models", "acme")) == {"M"}
    (warning,) = warnings_in(caplog)
    assert "hardpoint_models raised RuntimeError: in the hook" in warning.getMessage()
    assert [plugin.name for plugin in registry.extensions()] == ["good"]
    with pytest.raises(PluginLoadError, match="in the hook"):
        registry.load("extension", "broken")


@pytest.mark.parametrize("answer", ["['text']", "5", "[Change(key='a', old=1, new=2, reason='')]"])
def test_an_answer_of_the_wrong_type_is_the_plugins_failure(site, caplog, answer):
    site.plugin(
        "extension", "broken", source=f"@hookimpl\ndef hardpoint_models():\n    return {answer}"
    )
    registry = discover(site)
    assert registry.offers("hardpoint_models", "acme") == {}
    assert "not of Offer" in warnings_in(caplog)[0].getMessage()


def test_the_selected_platform_that_raises_in_a_hook_raises(site):
    source = "@hookimpl\ndef hardpoint_configure(config):\n    raise RuntimeError('in the hook')"
    site.platform("acme", source=source)
    registry, config = discover(site), config_of()
    platform = select_platform(registry, config)
    with pytest.raises(PluginLoadError, match="in the hook") as caught:
        registry.configure(config, platform)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_observer_that_raises_is_logged_once_and_the_others_hear(site, caplog):
    site.plugin(
        "extension",
        "a",
        source="@hookimpl\ndef hardpoint_model_loaded(worker):\n    raise OSError('full')",
    )
    site.plugin(
        "extension", "b", source="@hookimpl\ndef hardpoint_model_loaded(worker): worker.append(1)"
    )
    registry, heard = discover(site), []
    for _ in range(3):
        registry.announce("hardpoint_model_loaded", worker=heard)
    assert heard == [1, 1, 1]
    assert len(warnings_in(caplog)) == 1


def test_announcing_to_nobody_is_a_look_up(site):
    site.plugin("extension", "a")
    registry = discover(site)
    registry.announce("hardpoint_step_started", scheduler_output=None, rank=0)
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    registry.announce("hardpoint_step_started", scheduler_output=None, rank=0)
    sys.setprofile(None)
    assert len(calls) <= 4
    assert not registry.implementers("hardpoint_step_started")


# Workers.


def test_workers_get_exactly_the_plugins_in_use(site):
    site.platform("acme", version="3.1")
    site.platform("other", priority=-1)
    site.plugin("extension", "ext")
    site.plugin("extension", "broken", source="raise ValueError")
    registry = discover(site)
    select_platform(registry, config_of())
    resolved = registry.resolved()
    assert [(each.kind, each.name, each.version) for each in resolved] == [
        ("platform", "acme", "3.1"),
        ("extension", "ext", "1.0"),
    ]
    there = Registry.from_resolved(resolved, config_of(), path=site.path)
    assert [(p.kind, p.name, p.state) for p in there.plugins] == [
        ("platform", "acme", "loaded"),
        ("extension", "ext", "loaded"),
    ]
    assert there.resolved() == resolved
    assert there.platform("acme").name == "acme"


@pytest.mark.parametrize("change", [{"version": "3.2"}, {"distribution": "x"}, {"name": "y"}])
def test_a_worker_refuses_what_differs(site, change):
    site.platform("acme", version="3.1")
    registry = discover(site)
    select_platform(registry, config_of())
    (resolved,) = registry.resolved()
    with pytest.raises(IncompatiblePluginError, match="Install the same version"):
        Registry.from_resolved([evolve(resolved, **change)], path=site.path)


def test_a_plugin_that_fails_in_a_worker_raises_there(site):
    package = site.plugin("extension", "ext")
    registry = discover(site)
    resolved = registry.resolved()
    site.module(f"{package}.plugin", "raise OSError('not on this host')")
    del sys.modules[f"{package}.plugin"]
    with pytest.raises(PluginLoadError, match="not on this host"):
        Registry.from_resolved(resolved, path=site.path)


# Settings.

SETTINGS = """
from attrs import frozen
from hardpoint.config.schema import key

@frozen(kw_only=True)
class Settings:
    threads: int | None = key(None, "threads", low=1)
"""


def with_settings(site):
    package = site.platform("acme", record='settings="hp_acme.settings:Settings"')
    site.module(f"{package}.settings", SETTINGS)


def test_a_platform_gets_its_settings(site):
    with_settings(site)
    assert discover(site).platform("acme").settings.threads is None
    registry = discover(site, plugins={"acme": {"threads": 3}})
    assert registry.platform("acme").settings.threads == 3
    assert registry.platform("acme") is registry.platform("acme")


@pytest.mark.parametrize("raw", [{"threads": 0}, {"threads": "x"}, {"thread": 1}])
def test_wrong_settings_are_the_users_error_not_the_plugins_failure(site, raw):
    with_settings(site)
    registry = discover(site, plugins={"acme": raw})
    with pytest.raises(ConfigError, match=r"plugins\.acme\.thread"):
        select_platform(registry, config_of())
    assert state(registry, "acme") == "loaded"


def test_settings_for_a_plugin_that_has_none_are_an_error(site):
    site.plugin("extension", "acme")
    registry = discover(site, plugins={"acme": {"x": 1}})
    with pytest.raises(ConfigError, match=r"plugins\.acme.*has no settings"):
        registry.settings("extension", "acme")


def test_structured_settings_reach_a_worker_as_they_are(site):
    with_settings(site)
    config = config_of(plugins={"acme": {"threads": 2}})
    registry = Registry.discover(config, path=site.path)
    platform = select_platform(registry, config)
    section = evolve(config.plugins, settings={"acme": platform.settings})
    there = Registry.from_resolved(
        registry.resolved(), evolve(config, plugins=section), path=site.path
    )
    assert there.platform("acme").settings is platform.settings
