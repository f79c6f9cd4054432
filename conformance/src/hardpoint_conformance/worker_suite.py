"""The Worker suite: one rank's life, behind an executor."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from attrs import evolve
from hardpoint.capabilities import YES, Capability
from hardpoint.errors import (
    HardpointError,
    LifecycleError,
    MemoryBudgetError,
    UnsupportedError,
)
from hardpoint.executor import Executor
from hardpoint.kv_cache import DTYPE_BYTES, KVCacheSpec
from hardpoint.messages import SchedulerOutput
from hardpoint.records import LoadReport, SleepReport
from hardpoint.rpc.lifecycle import CAPABILITIES
from hardpoint.sleep import SleepStateError
from hardpoint.worker import Worker
from hardpoint.worker_calls import WorkerCalls

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.generation import SCORED, Bench
from hardpoint_conformance.kit_model import ModelShape
from hardpoint_conformance.sleep_model import TAGS, SleepModel
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.subject import plans
from hardpoint_conformance.suite import Suite, needs

PROMPT = (5, 9, 3, 77, 20)
SERVICES: dict[Capability, Callable[[Executor], Any]] = {
    Capability.LORA: WorkerCalls.list_loras,
    Capability.PROMPT_ADAPTERS: WorkerCalls.list_prompt_adapters,
    Capability.SLEEP: lambda executor: executor.sleep(1),
    Capability.WEIGHT_RELOAD: WorkerCalls.reload_weights,
    Capability.SHARDED_STATE: lambda executor: executor.save_sharded_state("unused"),
    Capability.PROFILE: WorkerCalls.start_profile,
    Capability.MULTIMODAL: WorkerCalls.reset_mm_cache,
    Capability.DATA_PARALLEL: WorkerCalls.execute_dummy_batch,
    Capability.SPECULATIVE: WorkerCalls.take_draft_token_ids,
}
"""Capability -> a service that needs it."""


class WorkerSuite(Suite):
    """Order, memory, sleep, reload, services, shutdown."""

    contract: ClassVar[str] = "worker"

    @property
    def bench(self) -> Bench:
        """A group of workers that can execute."""
        return Bench.of(self.subject)

    # The order of a life.

    def test_the_order_of_life_is_kept_and_the_missing_step_named(self) -> None:
        """Executing before there is a cache; loading twice."""
        group = self.subject.start()
        do = "Use WorkerHost: it keeps the order for every plugin alike."
        error = expect_raises(
            LifecycleError, lambda: group.execute_model(SchedulerOutput(step_id=1)),
            "a method that is called out of order raises LifecycleError", where=Worker, do=do,
        )  # fmt: skip
        expect(
            "initialize_from_config" in str(error), "the error names the missing step",
            seen=str(error), where=LifecycleError, do=do,
        )  # fmt: skip
        expect_raises(
            LifecycleError, lambda: group.collective_rpc("load_model"),
            "a worker loads once", where=Worker, do=do,
        )  # fmt: skip
        self.subject.end(group)

    def test_a_worker_can_be_shut_down_at_every_stage_and_twice(self) -> None:
        """Also after a failed start; ``Worker.shutdown`` must not need what came later."""
        stages = ("init_device", "load_model", "get_kv_cache_spec")
        for count in range(len(stages) + 1):
            prepared = self.subject.prepare()
            group = prepared.executor_class(prepared.config, prepared.registry, prepared.platform)
            path = self.subject.scratch("stage") / "shutdown"
            try:
                group.start_workers()
                group.collective_rpc(in_worker.note_shutdown, args=(str(path),))
                for stage in stages[:count]:
                    group.collective_rpc(stage)
            finally:
                group.shutdown()
                group.shutdown()
            for rank in range(group.world_size):
                notes = path.with_name(f"shutdown-{rank}").read_text().split()
                after = ", ".join(stages[:count]) or "nothing"
                expect_equal(
                    notes, ["begun", "done"],
                    f"shutdown gives everything back, after {after} too, and is called once",
                    where=Worker.shutdown, do="Test for what is there; let nothing raise.",
                )  # fmt: skip

    def test_after_an_end_a_new_worker_serves_in_the_same_process(self) -> None:
        """What the first one left does not stand in its way."""
        for _ in range(2):
            bench = Bench(self.subject, self.subject.ready())
            bench.check_greedy(bench.steps.alone(PROMPT, 3))
            self.subject.end(bench.executor)

    # Model, cache and memory.

    def test_reports_of_the_start_make_sense(self) -> None:
        """Bytes of weights, seconds, tasks, layouts."""
        group = self.bench.executor
        reports = group.load_reports
        expect(
            len(reports) == group.world_size
            and all(isinstance(r, LoadReport) and r.weight_bytes > 0 for r in reports),
            "load_model reports the bytes of weights that this worker holds", seen=reports,
            where=LoadReport, do="Sum the bytes of the tensors on the device.",
        )  # fmt: skip
        expect(
            "generate" in group.supported_tasks() and group.get_kv_cache_layout(),
            "a worker says what the model can do and which cache layouts it can use",
            seen=(group.supported_tasks(), group.get_kv_cache_layout()),
            where=Worker.supported_tasks, do="Return ('generate',) at least.",
        )  # fmt: skip

    def test_the_kv_cache_specs_describe_the_model(self) -> None:
        """A spec for each layer; bytes that add up."""
        bench = self.bench
        description, group = bench.description, bench.executor
        block = group.config.cache.block_size
        for specs, size in zip(
            group.get_kv_cache_specs(), group.collective_rpc("get_cache_block_size_bytes"),
            strict=True,
        ):  # fmt: skip
            sound = all(
                isinstance(spec, KVCacheSpec) and spec.block_size == block and spec.page_bytes > 0
                and spec.dtype in DTYPE_BYTES
                for spec in specs.values()
            )  # fmt: skip
            expect(
                sound and len(specs) <= description.num_layers,
                f"each layer of this rank has a spec, with blocks of {block} tokens", seen=specs,
                where=Worker.get_kv_cache_spec, do="Use config.cache.block_size.",
            )  # fmt: skip
            expect_equal(
                size, sum(spec.page_bytes for spec in specs.values()),
                "a block's bytes are the sum of its pages'",
                where=Worker.get_cache_block_size_bytes, do="Leave it to the base class.",
            )  # fmt: skip

    def test_the_memory_that_is_reported_can_be_had(self) -> None:
        """At least what the kit's small cache takes; a whole number of bytes."""
        group = self.subject.start()
        wanted = sum(tensor.num_bytes for tensor in plans(group)[0].tensors)
        for rank, free in enumerate(group.determine_available_memory()):
            expect(
                type(free) is int and free >= wanted,
                "determine_available_memory returns the bytes that the KV cache may use",
                seen=f"rank {rank}: {free!r}, and {wanted} are needed",
                where=Worker.determine_available_memory, do="Measure after loading, in bytes.",
            )  # fmt: skip
            devices = [device.memory_bytes for device in group.platform.probe().devices]
            share = group.placement.devices_per_worker
            if devices and None not in devices:
                most = share * max(size or 0 for size in devices)
                expect(
                    free <= most, "no more memory is available than the devices have",
                    seen=f"rank {rank}: {free} bytes, and its devices have {most} in all",
                    where=Worker.determine_available_memory, do="Look whether free and total are "
                    "swapped, and at their units.",
                )  # fmt: skip
        self.subject.end(group)

    def test_a_cache_that_cannot_fit_is_a_memory_budget_error(self) -> None:
        """The OOM of the contract has one type, with the figures in bytes."""
        group = self.subject.start()
        free = min(group.determine_available_memory())
        page = max(1, *group.collective_rpc("get_cache_block_size_bytes"))
        huge = plans(group, num_blocks=16 * max(free, 1 << 44) // page)
        error = expect_raises(
            MemoryBudgetError, lambda: group.initialize_from_config(huge),
            "memory that is not there is a MemoryBudgetError with the figures",
            where=MemoryBudgetError,
            do="Compare with what is free before you allocate; raise MemoryBudgetError.",
        )  # fmt: skip
        expect(
            any(char.isdigit() for char in str(error)), "the error has figures", seen=str(error),
            where=MemoryBudgetError, do="Say how many bytes were asked for and are free.",
        )  # fmt: skip
        self.subject.end(group)

    def test_the_environment_that_was_declared_is_there(self) -> None:
        """In every worker, before anything heavy was imported."""
        group = self.bench.executor
        declared = dict(group.platform.environment(group.config, group.placement))
        for rank, seen in enumerate(
            group.collective_rpc(in_worker.environment, args=(tuple(declared),))
        ):
            expect_equal(
                seen, declared, f"every worker has the variables of Platform.environment (rank "
                f"{rank})", where="hardpoint.platform.Platform.environment",
                do="Change no variable in the worker that the platform declares.",
            )  # fmt: skip

    # Sleep.

    @needs(Capability.SLEEP)
    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep_frees_and_waking_brings_all_back(self, level: int) -> None:
        """By the reports, by the probe, and by what comes out afterwards."""
        bench = Bench(self.subject, self.subject.ready())
        group = bench.executor
        before = bench.steps.alone(PROMPT, 6, self._scored()).output
        held = self._held(group)
        reports = group.sleep(level)
        weights = sum(report.weight_bytes for report in group.load_reports)
        freed = sum(report.bytes_freed for report in reports)
        expect(
            all(isinstance(report, SleepReport) for report in reports) and freed >= weights,
            "sleep frees the memory of weights and KV cache and reports the bytes",
            seen=f"{freed} bytes freed, the weights alone had {weights}", where=Worker.sleep,
            do="Give the memory back to the device, and report the allocator's account.",
        )  # fmt: skip
        asleep = self._held(group)
        if held is not None and asleep is not None:
            expect(
                held - asleep >= weights, "what sleeps holds no device memory",
                seen=f"{held} bytes before, {asleep} asleep, weights of {weights}",
                where=Worker.sleep, do="Drop or move every tensor, then empty the cache.",
            )  # fmt: skip
        group.wake_up()
        if level == 2:
            expect_raises(
                SleepStateError, lambda: group.execute_model(SchedulerOutput(step_id=99)),
                "weights that were dropped are undefined until they are loaded again",
                where=Worker.sleep, do="Leave the state to the base class.",
            )  # fmt: skip
            group.reload_weights()
        after = bench.steps.alone(PROMPT, 6, self._scored())
        bench.check_greedy(after, f"after sleep({level}) and waking")
        if after.logprobs:
            bench.check_scores(after, f"after sleep({level}) and waking")
        expect_equal(
            after.output, before, "waking brings back what slept", where=Worker.wake_up,
            do="Restore every buffer, those of modules too.",
        )  # fmt: skip
        self.subject.end(group)

    @needs(Capability.SLEEP)
    def test_sleep_follows_its_state_machine(self) -> None:
        """Sixty calls at random, beside a model of the states."""
        bench = Bench(self.subject, self.subject.ready())
        group, model = bench.executor, SleepModel()
        rng = random.Random(3)  # noqa: S311 - a history, not a secret
        reload = self.subject.support(Capability.WEIGHT_RELOAD) is YES
        history = []
        for _ in range(60):
            name = rng.choice(["sleep", "wake_up", "wake_up", "discard", "reload_weights", "step"])
            if name == "reload_weights" and not reload:
                continue
            argument = {
                "sleep": rng.choice([1, 2] if reload else [1]),
                "wake_up": tuple(rng.sample(TAGS, rng.randint(1, 2))),
                "discard": tuple(rng.sample(TAGS if reload else TAGS[1:], 1)),
            }.get(name)
            history.append(f"{name}({argument or ''})")
            self._move(bench, model, name, argument, history)
            expect_equal(
                group.sleeping_tags, model.sleeping,
                "each tag is awake or asleep as the calls before say", where=SleepStateError,
                do=f"After {' '.join(history[-6:])}: raise where a change failed.",
            )  # fmt: skip
        self.subject.end(group)

    def _move(
        self, bench: Bench, model: SleepModel, name: str, argument: Any, history: list[str]
    ) -> None:
        group = bench.executor
        allowed = True
        if name == "sleep":
            allowed = model.sleep(argument)
        elif name == "wake_up":
            model.wake(argument)
        elif name == "discard":
            model.discard(argument)
        elif name == "reload_weights":
            allowed = model.reload()
        elif model.can_execute:
            bench.check_greedy(bench.steps.alone(PROMPT, 2), f"after {' '.join(history[-6:])}")
            return
        else:
            allowed = False
            name, argument = "execute_model", SchedulerOutput(step_id=10_000 + len(history))

        def act() -> Any:
            method = getattr(group, name)
            return method() if argument is None else method(argument)

        if allowed:
            act()
        else:
            expect_raises(
                HardpointError, act, f"{history[-1]} is refused in the state that "
                f"{' '.join(history[-6:-1])} leads to", where=Worker.sleep,
                do="Leave the states to WorkerHost and the base class of Executor.",
            )  # fmt: skip

    @needs(Capability.SLEEP)
    def test_a_part_sleeps_alone(self) -> None:
        """The cache without a backup, the weights untouched."""
        bench = Bench(self.subject, self.subject.ready())
        group = bench.executor
        group.discard(["kv_cache"])
        expect_equal(
            group.sleeping_tags, {"kv_cache"}, "discard frees the tags that it is given",
            where=Worker.discard, do="Free those alone.",
        )  # fmt: skip
        group.wake_up(["kv_cache"])
        bench.check_greedy(bench.steps.alone(PROMPT, 4), "after the KV cache was discarded")
        self.subject.end(group)

    # Weights and services.

    @needs(Capability.WEIGHT_RELOAD)
    def test_weights_are_reloaded_in_place(self) -> None:
        """Another model of the same shape, and back."""
        bench = Bench(self.subject, self.subject.ready())
        group = bench.executor
        own = str(bench.description.path)
        shape = ModelShape.within(group.platform.limits(group.config))
        other = str(self.subject.model(evolve(shape, seed=shape.seed + 1)))
        for path in (other, own):
            group.reload_weights(path)
            bench.follow(path)
            bench.check_greedy(bench.steps.alone(PROMPT, 5), f"after reload_weights({path!r})")
        group.reload_weights()
        bench.check_greedy(bench.steps.alone(PROMPT, 5), "after reload_weights()")
        self.subject.end(group)

    @needs(Capability.PROFILE)
    def test_profiling_changes_nothing(self) -> None:
        """Started and stopped about two steps."""
        folder = self.subject.scratch("traces")
        bench = Bench(
            self.subject, self.subject.ready(None, **self.subject.probe.tracing(str(folder)))
        )
        bench.executor.start_profile()
        request = bench.steps.alone(PROMPT, 3)
        bench.executor.stop_profile()
        bench.check_greedy(request, "while it was profiled")
        self.subject.end(bench.executor)

    @pytest.mark.parametrize("capability", SERVICES, ids=lambda each: each.name)
    def test_what_is_not_declared_is_refused_and_what_is_declared_is_there(
        self, capability: Capability
    ) -> None:
        """UnsupportedError in the driver, and in the worker."""
        support = self.subject.support(capability)
        service = SERVICES[capability]
        if support is YES:
            name, base = _method(capability)
            kinds = self.bench.executor.collective_rpc(in_worker.implements, args=(name,))
            expect(
                all(kinds), f"a platform that declares {capability.name} overrides Worker.{name}",
                seen=f"{name} is the base class's", where=base,
                do=f"Implement it, or declare Capability.{capability.name} as NOT_YET.",
            )  # fmt: skip
            return
        expect_raises(
            UnsupportedError, lambda: service(self.bench.executor),
            f"{capability.value} is refused where the platform does not declare it",
            where=Worker, do="Leave the services to the base class of Executor.",
        )  # fmt: skip

    # Within.

    def _scored(self) -> Any:
        return SCORED if self.subject.support(Capability.LOGPROBS) is YES else GREEDY

    def _held(self, group: Executor) -> int | None:
        kind = type(self.subject.probe)
        held = group.collective_rpc(in_worker.held_bytes, args=(kind,))
        return None if None in held else sum(held)


def _method(capability: Capability) -> tuple[str, object]:
    name = next(name for name, each in CAPABILITIES.items() if each is capability)
    return name, getattr(Worker, name)
