"""One suite for every executor: what a caller may rely on, whatever is below.

``flavour`` runs each test on each executor. To certify another, add a line to FLAVOURS. A test that
must hold a worker back does it with a file, which works across processes.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import cloudpickle
import pytest
from attrs import evolve, field, frozen
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_executor, select_platform

PATIENCE = 60.0
"""Seconds after which a wait is a failure; nothing here takes as long."""


def _module(which):
    name = f"executor_suite_{which}"
    if name not in sys.modules:
        path = Path(__file__).with_name(f"{which}_executor.py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@frozen(kw_only=True)
class Flavour:
    """An executor as the configuration names it, how many workers the tests give it, and its own
    keys. ``processes``: each worker has a process of its own; ``launched``: each rank has one,
    rank 0 the driver, and asks plugins for its own variables. ``asks_for_variables``: plugins are
    asked for those of workers.
    """

    executor: object
    world_size: int
    keys: Mapping[str, object] = field(factory=dict)
    processes: bool = False
    launched: bool = False
    asks_for_variables: bool = True

    @property
    def num_processes(self) -> int:
        """How many processes there are, the driver's included."""
        return self.world_size if self.launched else 1 + self.world_size * self.processes

    @property
    def ranks_asked_for(self) -> range:
        """Those of whose workers plugins are asked for variables in the driver."""
        return range((1 if self.launched else self.world_size) * self.asks_for_variables)


def multiproc(world_size=2, **keys):
    keys = {f"plugins.mp.{key}": value for key, value in keys.items()}
    return Flavour(executor="mp", world_size=world_size, keys=keys, processes=True)


def launched(world_size):
    keys = {"driver_only": True, "start_timeout": 120.0}
    return Flavour(
        executor=f"{LAUNCHED.__name__}:LaunchedExecutor",
        world_size=world_size,
        keys={f"plugins.external_launcher.{key}": value for key, value in keys.items()},
        launched=True,
    )


THREADS = _module("threads")
LAUNCHED = _module("launched")
FLAVOURS = {
    "uni": Flavour(executor="uni", world_size=1),
    "threads": Flavour(executor=THREADS.ThreadsExecutor, world_size=3, asks_for_variables=False),
    "launched": launched(1),
    "launched-2": launched(2),
    "mp": multiproc(3, start="nursery"),
    "mp-plain": multiproc(start="plain"),
    "mp-zmq": multiproc(start="nursery", channel="zmq"),
    "ray": Flavour(executor="ray", world_size=2, processes=True),
    "ray_legacy": Flavour(executor="ray_legacy", world_size=2, processes=True),
}
ALL = tuple(path.stem for path in Path(__file__).parent.glob("test_suite_*.py"))
REPEATED = {
    "launched-2": ALL,
    "mp-plain": ("test_suite_calls", "test_suite_errors", "test_suite_services"),
    "mp-zmq": ("test_suite_errors", "test_suite_services"),
    "ray": ALL,
    "ray_legacy": ALL,
}
"""What differs from ``mp`` only in how workers start or calls travel, and processes that each
import torch to meet: they are of the slow lane.
"""
SPELLINGS = {
    "name": Flavour(executor="uni", world_size=1),
    "module:Class": Flavour(executor="hardpoint_uniproc.executor:UniProcExecutor", world_size=1),
    "dotted": Flavour(executor="hardpoint_uniproc.executor.UniProcExecutor", world_size=1),
    "foreign module:Class": Flavour(executor=f"{THREADS.__name__}:ThreadsExecutor", world_size=2),
    "foreign dotted": Flavour(executor=f"{THREADS.__name__}.ThreadsExecutor", world_size=2),
    "foreign class": Flavour(executor=THREADS.ThreadsExecutor, world_size=2),
    "mp by name": multiproc(),
    "mp as module:Class": evolve(
        multiproc(), executor="hardpoint_multiproc.executor:MultiprocExecutor"
    ),
}
"""One executor as all its spellings, for the tests that show that they are one."""


def pytest_collection_modifyitems(items):
    """Send functions of the tests by value: workers need not import pytest to run them."""
    for module in {item.module for item in items if item.path.parent == Path(__file__).parent}:
        cloudpickle.register_pickle_by_value(module)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.stem in REPEATED.get(parameters.get("flavour"), ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return FLAVOURS[request.param]


@pytest.fixture(params=["uni", "threads", "mp"])
def one_of_a_kind(request):
    """Each way to run workers once, for tests to which its variants make no difference."""
    return FLAVOURS[request.param]


@pytest.fixture
def threads_executor():
    """The executor whose workers are threads of the test's process."""
    return THREADS.ThreadsExecutor


@pytest.fixture(params=SPELLINGS)
def spelling(request):
    made = Launcher(SPELLINGS[request.param])
    yield made
    for executor in made.started:
        executor.shutdown()


@pytest.fixture
def world_size(flavour):
    return flavour.world_size


class Launcher:
    """Configures and starts executors on the dummy platform; ends them after the test."""

    def __init__(self, flavour):
        self.flavour = flavour
        self.started = []

    def prepare(self, **overrides):
        """Return (executor class, config, registry, platform)."""
        settings = {
            "model": "dummy",
            "load_format": "dummy",
            "platform": "dummy",
            "executor": self.flavour.executor,
            "block_size": 4,
            "max_model_len": 64,
            "plugins.dummy.num_workers": self.flavour.world_size,
            **self.flavour.keys,
            **overrides,
        }
        config = load_config(overrides=settings, environ={})
        registry = Registry.discover(config)
        platform = select_platform(registry, config)
        config = evolve(config, description=read_description("dummy", "dummy"))
        config = resolution.configure(config, registry, platform)
        config = resolution.fill_defaults(config, platform)
        executor_class = select_executor(registry, config, platform)
        config = resolution.structure_plugins(config, registry)
        resolution.check(config, registry, platform, executor_class)
        return executor_class, config, registry, platform

    def loaded(self, **overrides):
        """Start: workers that have loaded their model."""
        executor_class, config, registry, platform = self.prepare(**overrides)
        executor = executor_class.start(config, registry, platform)
        self.started.append(executor)
        return executor

    def ready(self, num_blocks=33, **overrides):
        """Start and give a KV cache: workers that can execute."""
        executor = self.loaded(**overrides)
        executor.initialize_cache(self.plans(executor, num_blocks))
        return executor

    @staticmethod
    def plans(executor, num_blocks=33):
        plans = []
        for specs in executor.get_kv_cache_specs():
            spec = next(iter(specs.values()))
            tensors = [
                KVCacheTensor(num_bytes=num_blocks * each.page_bytes, layers=(layer,))
                for layer, each in specs.items()
            ]
            group = KVCacheGroup(layers=tuple(specs), spec=spec)
            plans.append(
                KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=tuple(tensors))
            )
        return plans


@pytest.fixture(scope="session")
def ray_session():
    """A Ray that all executors ``ray`` of these tests share."""
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    opened = session.connect(RaySettings(address="local"), {"dummy": 64})
    yield opened
    opened.close()


@pytest.fixture
def launcher(flavour, request):
    if flavour.executor in ("ray", "ray_legacy"):
        request.getfixturevalue("ray_session")
    made = Launcher(flavour)
    yield made
    for executor in made.started:
        executor.shutdown()


@pytest.fixture
def group(launcher):
    """An executor whose workers can execute."""
    return launcher.ready()


class Gate:
    """Holds workers back: ``passing`` blocks until ``open``; ``entered`` counts who waits."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder = folder

    @property
    def passing(self):
        return pass_gate

    @property
    def args(self):
        return (str(self.folder),)

    def open(self):
        (self.folder / "open").touch()

    def wait_entered(self, count):
        wait_until(lambda: len(list(self.folder.glob("entered-*"))) >= count)


def pass_gate(worker, folder, result="passed"):
    folder = Path(folder)
    (folder / f"entered-{worker.rank}").touch()
    end = time.monotonic() + PATIENCE
    while not (folder / "open").exists():
        if time.monotonic() > end:
            raise TimeoutError("the test never opened the gate")
        time.sleep(0.002)
    return result


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never came true")
        time.sleep(0.002)


@pytest.fixture
def gate(tmp_path):
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


class Steps:
    """Plans for one request on its way, as a scheduler would make them."""

    def __init__(self):
        self.number = 0

    def new(self, req_id="a", prompt=(5, 6, 7), blocks=(1, 2), **fields):
        self.number += 1
        sampling = fields.pop("sampling", SamplingParams(temperature=0, seed=1))
        extra = fields.pop("extra", {})
        lora = fields.pop("lora", None)
        request = NewRequestData(
            req_id=req_id,
            prompt=prompt,
            sampling=sampling,
            block_ids=(blocks,),
            extra=extra,
            lora=lora,
        )
        return SchedulerOutput(
            step_id=self.number,
            new=(request,),
            num_tokens={req_id: len(prompt)},
            total_tokens=len(prompt),
            **fields,
        )

    def next(self, computed, output, req_id="a", **fields):
        self.number += 1
        running = CachedRequestData(
            req_ids=(req_id,), new_blocks=(None,), num_computed=(computed,), num_output=(output,)
        )
        return SchedulerOutput(
            step_id=self.number, running=running, num_tokens={req_id: 1}, total_tokens=1, **fields
        )

    def empty(self, **fields):
        self.number += 1
        return SchedulerOutput(step_id=self.number, **fields)


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def eventually():
    return wait_until
