"""The order of a worker's life, its end at every stage, and a life after another."""

from __future__ import annotations

from hardpoint.errors import LifecycleError
from hardpoint.messages import SchedulerOutput
from hardpoint.worker import Worker

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.suite import own_workers
from hardpoint_conformance.worker.part import PROMPT, WorkerPart


class OrderTests(WorkerPart):
    """What may follow what, and how it ends."""

    @own_workers
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

    @own_workers
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

    @own_workers
    def test_after_an_end_a_new_worker_serves_in_the_same_process(self) -> None:
        """What the first one left does not stand in its way."""
        for _ in range(2):
            bench = Bench(self.subject, self.subject.ready())
            bench.check_greedy(bench.steps.alone(PROMPT, 3))
            self.subject.end(bench.executor)
