"""The worker host: hooks in their order, worker methods per instance, what it refuses."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest
from attrs import evolve
from hardpoint.capabilities import YES, Capability
from hardpoint.checkpoints import read_description
from hardpoint.config import Config, resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import LifecycleError, PluginConflictError, RemoteError, UnsupportedError
from hardpoint.executor import Executor
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput
from hardpoint.records import WorkerContext
from hardpoint.registry import Registry
from hardpoint.rpc import codec
from hardpoint.rpc.calls import PackedCall
from hardpoint.rpc.host import WorkerHost
from hardpoint.selection import select_executor, select_platform
from hardpoint.worker import Worker
from hardpoint_dummy.worker import DummyWorker

RECORDING = """
    import os, threading
    LOG = []

    def note(name):
        LOG.append((name, os.getpid(), threading.current_thread().name))

    @hookimpl
    def hardpoint_configure(config):
        note("configure")
        return [Change(key="max_num_seqs", old=None, new=3, reason="for the test")]

    @hookimpl
    def hardpoint_worker_env(config, rank):
        note("worker_env")
        return {}

    @hookimpl
    def hardpoint_worker_methods():
        note("worker_methods")
        return {"seqs_of": lambda worker, more=0: worker.config.scheduler.max_num_seqs + more}

    @hookimpl
    def hardpoint_worker_started(worker):
        note("worker_started")

    @hookimpl
    def hardpoint_model_loaded(worker):
        note("model_loaded")

    @hookimpl
    def hardpoint_step_started(scheduler_output, rank):
        note(f"step_started {scheduler_output.step_id} rank {rank}")

    @hookimpl
    def hardpoint_step_finished(scheduler_output, output, rank):
        known = None if output is None else output.step_id
        note(f"step_finished {scheduler_output.step_id} rank {rank} output {known}")

    @hookimpl
    def hardpoint_worker_closing(worker):
        note("worker_closing")

    @hookimpl
    def hardpoint_executor_failed(executor, error):
        note(f"failed {error}")
"""


def prepare(*, path=None, **overrides):
    settings = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": "uni",
        **overrides,
    }
    config = load_config(overrides=settings, environ={})
    registry = Registry.discover(config, path=path)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    return config, registry, platform


def start(config, registry, platform) -> Executor:
    return select_executor(registry, config, platform).start(config, registry, platform)


def give_cache(executor, num_blocks=9):
    specs = executor.get_kv_cache_specs()[0]
    spec = next(iter(specs.values()))
    size = num_blocks * spec.page_bytes
    plan = KVCacheConfig(
        num_blocks=num_blocks,
        groups=(KVCacheGroup(layers=tuple(specs), spec=spec),),
        tensors=tuple(KVCacheTensor(num_bytes=size, layers=(layer,)) for layer in specs),
    )
    executor.initialize_from_config([plan])
    executor.compile_or_warm_up_model()


@pytest.fixture
def recorded(site):
    """An extension that implements every hook of a worker's life; yields its module's log."""
    package = site.plugin("extension", "tracer", source=RECORDING)
    return lambda: sys.modules[f"{package}.plugin"].LOG


def test_hooks_fire_in_their_order_on_their_threads(recorded, site):
    config, registry, platform = prepare(path=[*site.path, *sys.path])
    assert config.scheduler.max_num_seqs == 3
    with start(config, registry, platform) as executor:
        give_cache(executor)
        executor.execute_model(SchedulerOutput(step_id=1))
        ticket = executor.execute_model(SchedulerOutput(step_id=2, defer_sampling=True))
        executor.sample_tokens(ticket)
        assert executor.collective_rpc("seqs_of", args=(10,)) == [13]
    log = recorded()
    assert [name for name, _, _ in log] == [
        "configure",
        "worker_env",
        "worker_methods",
        "worker_started",
        "model_loaded",
        "step_started 1 rank 0",
        "step_finished 1 rank 0 output 1",
        "step_started 2 rank 0",
        "step_finished 2 rank 0 output 2",
        "worker_closing",
    ]
    threads = {name.split()[0]: thread for name, _, thread in log}
    assert threads.pop("configure") == threads.pop("worker_env") == "MainThread"
    assert set(threads.values()) == {"hardpoint-uni"}


def test_a_step_that_fails_is_announced_as_finished_without_output(recorded, site):
    config, registry, platform = prepare(
        path=[*site.path, *sys.path], **{"plugins.dummy.fail_at": "step"}
    )
    with start(config, registry, platform) as executor:
        give_cache(executor)
        with pytest.raises(RemoteError):
            executor.execute_model(SchedulerOutput(step_id=1))
    names = [name for name, _, _ in recorded()]
    assert "step_finished 1 rank 0 output None" in names


def test_failure_is_announced_once(recorded, site):
    config, registry, platform = prepare(path=[*site.path, *sys.path])
    with start(config, registry, platform) as executor:
        executor.fail(RuntimeError("first"))
        executor.fail(RuntimeError("second"))
    assert [name for name, _, _ in recorded() if name.startswith("failed")] == ["failed first"]


# Methods that plugins add.


def test_added_methods_belong_to_one_engines_worker_and_change_no_class(recorded, site):
    before = {name: value for kind in DummyWorker.__mro__ for name, value in vars(kind).items()}
    bases = DummyWorker.__mro__
    config, registry, platform = prepare(path=[*site.path, *sys.path])
    plain_config, plain_registry, plain_platform = prepare(
        path=[*site.path, *sys.path], **{"plugins.disable": ["tracer"]}
    )
    with (
        start(config, registry, platform) as with_method,
        start(plain_config, plain_registry, plain_platform) as without,
    ):
        assert with_method.collective_rpc("seqs_of") == [3]
        with pytest.raises(RemoteError, match="has no method 'seqs_of'"):
            without.collective_rpc("seqs_of")
        with pytest.raises(RemoteError, match="did you mean seqs_of"):
            with_method.collective_rpc("seq_of")
        [has] = with_method.collective_rpc(lambda worker: hasattr(worker, "seqs_of"))
        assert not has
    assert DummyWorker.__mro__ == bases
    assert before == {n: v for kind in DummyWorker.__mro__ for n, v in vars(kind).items()}


@pytest.mark.parametrize("name", ["load_model", "apply_model", "recorded_calls", "rank", "_x"])
def test_an_added_method_cannot_take_a_name_that_is_there(site, name):
    site.plugin(
        "extension",
        "taker",
        source=f"""
    @hookimpl
    def hardpoint_worker_methods():
        return {{{name!r}: print}}
    """,
    )
    config, registry, platform = prepare(path=[*site.path, *sys.path])
    with pytest.raises(PluginConflictError, match=f"offers the worker method {name!r}"):
        start(config, registry, platform)


# What the host refuses.


class Bad(DummyWorker):
    """Returns what a worker must not."""

    returned: object = None

    def execute_model(self, scheduler_output):
        return self.returned


@pytest.fixture
def host():
    config, registry, platform = prepare()
    made = []

    def make(worker=DummyWorker, **context):
        fields = {"config": config, "rank": 0, "local_rank": 0, "world_size": 1, **context}
        made.append(WorkerHost(WorkerContext(**fields), platform, registry, worker))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("value", [None, "tokens", {"step_id": 1}], ids=["none", "text", "mapping"])
def test_a_step_must_give_its_output(host, value):
    made = host(Bad)
    made.worker.returned = value
    made.lifecycle.stage = made.lifecycle.stage.READY
    with pytest.raises(LifecycleError, match=r"Bad.execute_model returned .* for step 1"):
        made._execute_model(SchedulerOutput(step_id=1))


def test_a_step_is_told_how_many_calls_were_none_and_nobody_else_is(host):
    told = []

    class Told(Bad):
        def execute_model(self, scheduler_output):
            told.append(self.other_calls)
            if scheduler_output.step_id == 3:
                raise OSError("in the step")
            return ModelRunnerOutput(step_id=scheduler_output.step_id)

    made = host(Told)
    made.lifecycle.stage = made.lifecycle.stage.READY
    outside = []

    def call(method, *args):
        body = codec.pack((method, args, {}), "")
        made.handle(PackedCall(1, 0, method if isinstance(method, str) else "it", body))
        outside.append(made.worker.other_calls)

    def step(number):
        call("execute_model", SchedulerOutput(step_id=number))

    step(1)
    step(2)
    step(3)
    step(4)
    call("get_kv_cache_spec")
    step(5)
    call(print)
    call("no_such_method")
    step(6)
    assert [count - told[0] for count in told] == [0, 0, 0, 0, 1, 3]
    assert set(outside) == {None}


def test_plans_for_another_world_are_refused(host):
    with pytest.raises(LifecycleError, match="2 plans for 1 ranks"):
        host()._initialize_from_config((None, None))


def test_an_executor_reference_or_a_class_makes_the_worker(host):
    assert type(host("hardpoint_dummy.worker:DummyWorker").worker) is DummyWorker
    assert type(host(DummyWorker).worker) is DummyWorker
    with pytest.raises(TypeError, match=r"is not a subclass of hardpoint.worker.Worker"):
        host("hardpoint_dummy.model:FakeModel")


def test_a_profile_s_argument_that_the_worker_s_class_lacks_is_refused_before_it_is_called(host):
    class Plain(DummyWorker):
        """Written for an older contract."""

        calls: ClassVar[list] = []

        def profile(self, is_start, prefix=None):
            self.calls.append((is_start, prefix))

    made = host(Plain)

    def call(*args, **kwargs):
        return made._run(PackedCall(1, 0, "profile", codec.pack(("profile", args, kwargs), "")))

    call(True, "run", 0, None)
    call(False)
    assert Plain.calls == [(True, "run"), (False, None)]
    with pytest.raises(UnsupportedError, match=r"Plain does not support delay_iterations = 2 of"):
        call(True, "run", 2, None)
    with pytest.raises(UnsupportedError, match="max_iterations = 1 of profile"):
        call(True, max_iterations=1)
    with pytest.raises(TypeError, match="with_stack"):
        call(True, with_stack=True)
    assert len(Plain.calls) == 2


def test_tickets_that_the_driver_gave_up_do_not_pile_up(host):
    made = host()
    for method in ("_init_device", "_load_model"):
        getattr(made, method)()
    for step in range(50):
        made._execute_model(SchedulerOutput(step_id=step, defer_sampling=True))
    assert len(made._waiting) == 8


def test_closing_is_once_and_survives_a_worker_that_raises(host, caplog):
    class Stubborn(DummyWorker):
        closings = 0

        def shutdown(self):
            type(self).closings += 1
            raise OSError("the device is gone")

    made = host(Stubborn)
    made.close()
    made.close()
    assert Stubborn.closings == 1
    assert "closing the worker raised" in caplog.text


def test_rank_and_driver_worker_come_from_the_context(host):
    assert [host(rank=rank, world_size=4).worker.rank for rank in range(4)] == [0, 1, 2, 3]
    config, _, _ = prepare()
    parallel = evolve(config.parallel, tensor_parallel_size=2)
    config = evolve(config, parallel=parallel)
    drivers = [
        host(rank=rank, world_size=4, config=config).worker.is_driver_worker for rank in range(4)
    ]
    assert drivers == [True, False, True, False]


def test_optional_services_of_a_bare_worker_name_capability_and_platform():
    class Bare(Worker):
        pass

    Bare.__abstractmethods__ = frozenset()
    config, registry, platform = prepare()
    worker = Bare(
        WorkerContext(config=config, rank=0, local_rank=0, world_size=1), platform, registry
    )
    calls = {
        Capability.LORA: worker.list_loras,
        Capability.SLEEP: lambda: worker.sleep(1),
        Capability.PROMPT_ADAPTERS: lambda: worker.pin_prompt_adapter(1),
        Capability.PROFILE: lambda: worker.profile(True),
        Capability.SPECULATIVE: worker.take_draft_token_ids,
    }
    for capability, call in calls.items():
        with pytest.raises(UnsupportedError, match="platform 'dummy' does not support") as caught:
            call()
        assert caught.value.capability == capability.value
    assert platform.capabilities[Capability.LORA] is YES
    assert isinstance(config, Config)
