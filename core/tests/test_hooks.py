"""One test for each hook, named after it: who is asked, where, with what, and what comes of it."""

from __future__ import annotations

import importlib
import re
import textwrap
import threading
from contextlib import contextmanager

import pytest
from attrs import evolve
from hardpoint import hookspecs
from hardpoint.config.loading import load_config
from hardpoint.config.resolution import configure, fill_defaults
from hardpoint.errors import (
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    RemoteError,
)
from hardpoint.kv_cache import KVCacheConfig
from hardpoint.messages import SchedulerOutput
from hardpoint.registry import Registry
from hardpoint.selection import select_executor, select_platform

HOOKS = [name for name in vars(hookspecs) if name.startswith("hardpoint_")]


def config_of(**overrides):
    return load_config(overrides=overrides, environ={})


def start(site, **overrides):
    """Return (registry, config, platform), as the engine does before it starts workers."""
    config = config_of(**overrides)
    registry = Registry.discover(config, path=site.path)
    platform = select_platform(registry, config)
    return registry, config, platform


def extension(site, source, name="ext"):
    site.plugin("extension", name, source=source)
    return f"hp_{name}.plugin"


@contextmanager
def running(site, **overrides):
    """A worker of the dummy platform on the in-process executor, with the site's extensions."""
    keys = {"platform": "dummy", "executor": "uni", "model": "dummy", "load_format": "dummy"}
    config = config_of(**keys, **overrides)
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    executor_class = select_executor(registry, config, platform)
    config = fill_defaults(configure(config, registry, platform), platform)
    with executor_class.start(config, registry, platform) as executor:
        yield executor


def test_every_hook_has_a_test_named_after_it():
    assert len(HOOKS) >= 20
    for hook in HOOKS:
        assert f"test_{hook}" in globals(), f"no test is named after {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_an_example_that_registers(site, hook):
    text = textwrap.dedent(getattr(hookspecs, hook).__doc__.partition("Example::")[2])
    assert f"def {hook}(" in text, f"{hook} has no example of itself"
    kind = re.sub("hardpoint_", "", hook)
    if kind in ("platform", "executor", "extension"):
        source = (
            "from hardpoint.hookspecs import hookimpl\nfrom hardpoint.records import *\n" + text
        )
        site.add("hp-ext", entry_points={kind: {"NAME": "example"}}, modules={"example": source})
        found = re.search(r'name="(\w+)"', text).group(1)
        entry = site.folder / "hp_ext-1.0.dist-info" / "entry_points.txt"
        entry.write_text(entry.read_text().replace("NAME", found))
        assert Registry.discover(path=site.path).load(kind, found).record.name == found
    else:
        extension(site, text)
        registry = Registry.discover(path=site.path)
        assert hook in registry.implemented(registry.load("extension", "ext"))


# Offers of identity.

EXECUTOR = """
from hardpoint.executor import Executor

class Threads(Executor):
    def start_workers(self): pass
    def call_workers(self, call): pass
    def probe_health(self, timeout): return []
    def stop_workers(self, deadline): pass
"""


def test_hardpoint_platform(site):
    site.platform("acme", record='summary="a unit"')
    registry = Registry.discover(path=site.path)
    record = registry.load("platform", "acme").record
    assert (record.name, record.api, record.summary) == ("acme", (2, 0), "a unit")
    assert registry.platform("acme").name == "acme"


def test_hardpoint_executor(site):
    site.plugin("executor", "threads", 'executor="hp_threads.executor:Threads"')
    site.module("hp_threads.executor", EXECUTOR)
    registry = Registry.discover(path=site.path)
    assert registry.load("executor", "threads").record.probe is None
    assert registry.executor("threads").__name__ == "Threads"


def test_hardpoint_extension(site):
    site.plugin("extension", "tracer", 'summary="traces"')
    registry = Registry.discover(path=site.path)
    assert [plugin.record.summary for plugin in registry.extensions()] == ["traces"]


# Before workers start.


def test_hardpoint_configure(site):
    site.platform(
        "acme",
        source="""
        @hookimpl
        def hardpoint_configure(config):
            if config.cache.block_size is not None:
                raise ValueError("it is set")
            return [Change(key="block_size", old=None, new=32, reason="the unit works on 32")]
        """,
    )
    registry, config, platform = start(site)
    changed = configure(config, registry, platform)
    assert changed.cache.block_size == 32
    assert "acme" in changed.origins["block_size"]
    assert "works on 32" in changed.origins["block_size"]
    assert config.cache.block_size is None
    registry, config, platform = start(site, block_size=8)
    with pytest.raises(PluginLoadError, match="it is set"):
        configure(config, registry, platform)


def test_hardpoint_worker(site):
    answer = "@hookimpl\ndef hardpoint_worker(config, platform):\n    return {!r}"
    site.platform("acme", source=answer.format("acme.fast:Worker"))
    extension(site, answer.format("ext.worker:Worker"))
    extension(site, "", name="silent")
    registry, config, platform = start(site)
    assert registry.worker_class(config, platform) == "acme.fast:Worker"
    named = evolve(config, worker="ext")
    assert registry.worker_class(named, platform) == "ext.worker:Worker"
    with pytest.raises(PluginError, match=r"hp-silent 1\.0.*None"):
        registry.worker_class(evolve(config, worker="silent"), platform)
    with pytest.raises(PluginNotFoundError, match="Did you mean 'ext'"):
        registry.worker_class(evolve(config, worker="exd"), platform)


def test_hardpoint_model_runner(site):
    answer = "@hookimpl\ndef hardpoint_model_runner(platform):\n    return {}"
    site.platform("acme", source=answer.format(None))
    extension(site, answer.format("'ext.runner:' + platform.name"))
    registry, config, platform = start(site)
    assert registry.model_runner_class(config, platform) == "hp_acme.runner:TheRunner"
    named = evolve(config, model_runner="ext")
    assert registry.model_runner_class(named, platform) == "ext.runner:acme"


def test_hardpoint_worker_env(site):
    answer = "@hookimpl\ndef hardpoint_worker_env(config, rank):\n    return {}"
    site.platform("acme", source=answer.format("{'UNITS': str(rank), 'LEVEL': '2'}"))
    extension(site, answer.format("{'LEVEL': '2', 'TRACE': 'on'}"))
    registry, config, _ = start(site)
    assert registry.worker_env(config, 3) == {"UNITS": "3", "LEVEL": "2", "TRACE": "on"}
    extension(site, answer.format("{'LEVEL': '7'}"), name="rival")
    registry, config, _ = start(site)
    with pytest.raises(PluginConflictError, match=r"LEVEL.*hp-rival") as caught:
        registry.worker_env(config, 0)
    assert "'2'" in str(caught.value)
    assert "'7'" in str(caught.value)


# Offers of parts.


def offered(site, hook, record="Offer"):
    """Check that a part offered by an extension reaches whoever asks, and the rule of platforms."""
    extension(
        site,
        f"""
        @hookimpl
        def {hook}():
            return [
                {record}(name="part", reference="ext.part:Part"),
                {record}(name="part", reference="ext.part:Own", platform="acme"),
                {record}(name="foreign", reference="ext.part:Foreign", platform="other"),
            ]
        """,
    )
    site.platform("acme")
    registry, _, platform = start(site)
    found = registry.offers(hook, platform.name)
    assert {name: offer.reference for name, offer in found.items()} == {"part": "ext.part:Own"}
    assert registry.offers(hook, "elsewhere")["part"].reference == "ext.part:Part"
    assert registry.implementers(hook) == ("ext",)


def test_hardpoint_scheduling(site):
    offered(site, "hardpoint_scheduling")


def test_hardpoint_operations(site):
    offered(site, "hardpoint_operations", record="Operation")


def test_hardpoint_quantizations(site):
    offered(site, "hardpoint_quantizations")


def test_hardpoint_models(site):
    offered(site, "hardpoint_models")


def test_hardpoint_batch_columns(site):
    offered(site, "hardpoint_batch_columns")


def test_hardpoint_graph_policies(site):
    offered(site, "hardpoint_graph_policies")


def test_hardpoint_logits_processors(site):
    offered(site, "hardpoint_logits_processors")


def test_hardpoint_drafters(site):
    offered(site, "hardpoint_drafters")


def test_hardpoint_kv_connectors(site):
    offered(site, "hardpoint_kv_connectors")


def test_hardpoint_ec_connectors(site):
    offered(site, "hardpoint_ec_connectors")


def test_hardpoint_weight_loaders(site):
    offered(site, "hardpoint_weight_loaders")


def test_hardpoint_weight_transfers(site):
    offered(site, "hardpoint_weight_transfers")


def test_hardpoint_worker_methods(site):
    source = """
        def rank_and(worker, word, times=1):
            return f"{worker.rank}{word * times}"
        @hookimpl
        def hardpoint_worker_methods():
            return {"rank_and": rank_and}
        """
    extension(site, source)
    with running(site) as executor:
        assert executor.collective_rpc("rank_and", args=("!",), kwargs={"times": 2}) == ["0!!"]
    extension(site, source, name="rival")
    with pytest.raises((PluginConflictError, RemoteError), match=r"rank_and.*hp-ext.*hp-rival"):
        running(site).__enter__()


# Announcements.

HEARS = """
import threading
heard = []
@hookimpl
def {hook}({arguments}):
    heard.append((threading.current_thread().name, {arguments}))
"""


def hearing(site, hook, arguments):
    """Install an observer of ``hook``; return a function that gives what it heard."""
    module = extension(site, HEARS.format(hook=hook, arguments=arguments))
    return lambda: importlib.import_module(module).heard


def test_hardpoint_worker_started(site):
    heard = hearing(site, "hardpoint_worker_started", "worker")
    with running(site) as executor:
        ((thread, worker),) = heard()
        assert worker.rank == 0
        assert thread != threading.main_thread().name
        executor.collective_rpc("get_kv_cache_spec")
    assert len(heard()) == 1


def test_hardpoint_model_loaded(site):
    heard = hearing(site, "hardpoint_model_loaded", "worker")
    with running(site):
        ((_, worker),) = heard()
        assert worker.get_model() is not None


def run_empty_step(executor):
    empty = KVCacheConfig(num_blocks=2, tensors=(), groups=())
    executor.get_kv_cache_specs()
    executor.collective_rpc("initialize_from_config", args=((empty,),))
    executor.collective_rpc("compile_or_warm_up_model")
    step = SchedulerOutput(step_id=7)
    return step, executor.execute_model(step)


def test_hardpoint_step_started(site):
    heard = hearing(site, "hardpoint_step_started", "scheduler_output, rank")
    with running(site) as executor:
        run_empty_step(executor)
        ((thread, scheduler_output, rank),) = heard()
    assert (scheduler_output.step_id, rank) == (7, 0)
    assert thread != threading.main_thread().name


def test_hardpoint_step_finished(site):
    heard = hearing(site, "hardpoint_step_finished", "scheduler_output, output, rank")
    with running(site) as executor:
        run_empty_step(executor)
        ((_, scheduler_output, output, rank),) = heard()
    assert (scheduler_output.step_id, output.step_id, rank) == (7, 7, 0)


def test_hardpoint_executor_failed(site):
    heard = hearing(site, "hardpoint_executor_failed", "executor, error")
    with running(site) as executor:
        first = OSError("the unit is gone")
        executor.fail(first)
        executor.fail(OSError("later"))
        ((_, told, error),) = heard()
    assert told is executor
    assert error is first


def test_hardpoint_worker_closing(site):
    heard = hearing(site, "hardpoint_worker_closing", "worker")
    with running(site):
        assert heard() == []
    ((_, worker),) = heard()
    assert worker.rank == 0


def test_hooks_fire_in_the_order_of_a_workers_life(site):
    hooks = {
        "configure": "config",
        "worker": "config, platform",
        "worker_env": "config, rank",
        "worker_methods": "",
        "model_runner": "config, platform",
        "worker_started": "worker",
        "model_loaded": "worker",
        "worker_closing": "worker",
    }
    lines = "import threading\nfired = []\nmain = threading.main_thread()\n"
    for name, arguments in hooks.items():
        lines += (
            f"@hookimpl\ndef hardpoint_{name}({arguments}):\n"
            f"    fired.append(({name!r}, threading.current_thread() is main))\n"
        )
        if name == "worker":
            lines += '    return "hardpoint_dummy.worker:DummyWorker"\n'
        if name == "model_runner":
            lines += '    return "hardpoint_dummy.model_runner:DummyModelRunner"\n'
    module = extension(site, lines)
    with running(site, worker="ext", model_runner="ext"):
        pass
    fired = list(dict.fromkeys(importlib.import_module(module).fired))
    order = [name for name, _ in fired]
    assert order.index("configure") == 0
    assert order.index("model_runner") < order.index("worker_methods")
    assert order.index("worker_env") < order.index("worker_started")
    assert order.index("worker_started") < order.index("model_loaded")
    assert order.index("model_loaded") < order.index("worker_closing")
    assert set(order) == set(hooks)
    in_driver = dict(fired)
    assert all(in_driver[name] for name in ("configure", "worker", "model_runner", "worker_env"))
    assert not any(in_driver[name] for name in ("worker_methods", "worker_started", "model_loaded"))
