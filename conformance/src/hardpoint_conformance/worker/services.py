"""Weights that are loaded again, profiling, and which services are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hardpoint.capabilities import YES, Capability
from hardpoint.errors import UnsupportedError
from hardpoint.executor import Executor
from hardpoint.rpc.lifecycle import CAPABILITIES
from hardpoint.worker import Worker
from hardpoint.worker_calls import WorkerCalls

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_raises
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.kit_model import ModelShape
from hardpoint_conformance.suite import needs, own_workers
from hardpoint_conformance.worker.part import PROMPT, WorkerPart

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


class ServiceTests(WorkerPart):
    """What is declared is there, and what is not is refused."""

    @own_workers
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

    @own_workers
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


def _method(capability: Capability) -> tuple[str, object]:
    name = next(name for name, each in CAPABILITIES.items() if each is capability)
    return name, getattr(Worker, name)
