"""Exceptions of workers, and values that cannot cross."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from attrs import evolve
from hardpoint.errors import EncodingError, HardpointError, LifecycleError, RemoteError
from hardpoint.executor import Executor
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput, StepTicket

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.executor.part import ExecutorPart
from hardpoint_conformance.steps import Steps
from hardpoint_conformance.watching import wait_until

DELIVER = "Deliver the Reply of WorkerHost.handle as it is."


class ErrorTests(ExecutorPart):
    """Typed, with rank, traceback, cause; of one call alone."""

    def test_a_remote_error_has_type_rank_traceback_notes_and_the_original(self) -> None:
        """For calls that wait and for those that do not."""
        for non_block in (False, True):
            error = self._raised("noted", non_block=non_block)
            original = error.__cause__
            facts = (
                error.rank in self.workers.ranks, error.type_name.endswith("KitError"),
                "in raise_error" in error.remote_traceback,
                isinstance(original, in_worker.KitError) and original.args == (7, "x"),
                "a note of the worker" in error.remote_traceback,
            )  # fmt: skip
            expect(
                all(facts), "a RemoteError has rank, type, remote traceback and the original",
                seen=f"rank {error.rank}, type {error.type_name}, cause {original!r}",
                where=RemoteError, do=DELIVER,
            )  # fmt: skip

    def test_the_chain_of_causes_comes_along(self) -> None:
        """``raise ... from ...`` in the worker."""
        cause = self._raised("chained").__cause__
        root = None if cause is None else cause.__cause__
        expect(
            isinstance(root, KeyError), "the original exception keeps its causes", seen=repr(root),
            where=RemoteError, do=DELIVER,
        )  # fmt: skip

    def test_an_exception_that_cannot_be_rebuilt_still_tells_type_and_text(self) -> None:
        """Its class is not called with the wrong arguments."""
        error = self._raised("bare")
        expect(
            error.type_name.endswith("BareError") and "code 9" in str(error),
            "an exception that cannot travel tells its type and text all the same", seen=str(error),
            where=RemoteError, do=DELIVER,
        )  # fmt: skip

    @pytest.mark.parametrize("kind", ["exit", "interrupt"])
    def test_leaving_the_process_from_a_method_is_an_error_of_that_call_alone(
        self, kind: str
    ) -> None:
        """SystemExit and KeyboardInterrupt end no worker."""
        self._raised(kind)
        expect_equal(
            len(self.group.check_health()), self.workers.count,
            "an error that every rank acknowledges belongs to that call alone", where=Executor,
            do="Let WorkerHost.handle catch BaseException; do not end the loop.",
        )  # fmt: skip

    def test_a_failure_of_the_start_is_raised_by_the_start(self) -> None:
        """With the rank and the worker's own exception."""
        rank = self.workers.count - 1
        for point in ("init_device", "load"):
            keys: dict[str, object] = {"plugins.dummy.fail_at": f"{point}@{rank}"}
            error = expect_raises(
                (HardpointError, ValueError), partial(self.start, **keys),
                "start raises what the first failing rank raised", where=Executor.start,
                do="Raise the failing rank's own error.",
            )  # fmt: skip
            if isinstance(error, RemoteError):
                error = error.__cause__ or error
            expect(
                "injected fault" in str(error), "start raises what the first failing rank raised",
                seen=repr(error), where=Executor.start, do="Raise the failing rank's own error.",
            )  # fmt: skip

    def test_a_failing_step_fails_alone_and_is_never_an_output(self) -> None:
        """On the last rank, which need not be the one that replies."""
        last = self.workers.count - 1
        group = self.start(**{"plugins.dummy.fail_at": f"step:2@{last},sample:1@{last}"})
        steps = Steps(group)
        request = steps.add((5, 6, 7))
        steps.run(1)
        error = expect_raises(
            (RemoteError, ValueError), lambda: steps.step({request.req_id: 1}),
            "a worker's error in a step is raised, never encoded in an output",
            where=Executor.execute_model, do="Every rank acknowledges; raise the first error.",
        )  # fmt: skip
        expect(
            "step" in str(error), "the step raises the worker's own error", seen=repr(error),
            where=Executor.execute_model, do=DELIVER,
        )  # fmt: skip
        plan = steps.plan({request.req_id: 1}, defer_sampling=True)
        ticket = group.execute_model(plan)
        expect_equal(
            ticket, StepTicket(step_id=plan.step_id, generation=group.generation),
            "a deferred step gives the ticket of that step", where=StepTicket, do=DELIVER,
        )  # fmt: skip
        expect_raises(
            (RemoteError, ValueError), lambda: group.sample_tokens(ticket),
            "an error while sampling is raised", where=Executor.sample_tokens, do=DELIVER,
        )  # fmt: skip
        self.subject.end(group)

    def test_a_step_gives_the_output_ranks_output(self) -> None:
        """With its number, and a future of it likewise."""
        group = self.start()
        steps = Steps(group)
        request = steps.add((5, 6, 7))
        for non_block in (False, True):
            plan = steps.plan({request.req_id: request.left})
            output = group.execute_model(plan, non_block=non_block)
            output = output.result(60) if non_block else output
            expect(
                isinstance(output, ModelRunnerOutput) and output.step_id == plan.step_id
                and output.req_ids == (request.req_id,),
                "execute_model returns the step's output, from the output rank", seen=output,
                where=Executor.execute_model, do="Pass reply_rank on.",
            )  # fmt: skip
            steps.take(plan, output)
        self.subject.end(group)

    def test_a_plan_arrives_as_it_was_sent(self) -> None:
        """On every rank, with the records of plugins in ``extra``."""
        group = self.start()
        steps = Steps(group)
        request = steps.add((5, 6, 7), extra={"somebody-else": {"note": [1, 2]}})
        plan = steps.plan({request.req_id: 3}, extra={"somebody-else": {"step": 1}})
        group.collective_rpc(in_worker.keep_plans)
        group.execute_model(plan)
        wanted = evolve(plan, generation=group.generation)
        for rank, plans in enumerate(group.collective_rpc(in_worker.kept_plans)):
            expect_equal(
                plans, [wanted], f"every rank gets the step's plan whole (rank {rank})",
                where=Executor.execute_model, do="Send the plan as it is, once to each worker.",
            )  # fmt: skip
        self.subject.end(group)

    def test_a_step_of_another_generation_is_refused(self) -> None:
        """A group that was restarted never hears its predecessor."""
        stale = SchedulerOutput(step_id=1, generation=self.group.generation + 5)
        expect_raises(
            LifecycleError, lambda: self.group.collective_rpc("execute_model", args=(stale,)),
            "calls, replies and steps carry a generation; another one's is refused",
            where=Executor, do="Hand the executor's generation to every WorkerContext.",
        )  # fmt: skip

    # What cannot cross.

    def test_an_argument_that_cannot_cross_is_named_and_nothing_is_sent(self) -> None:
        """With the path to the value."""
        held = {"a": [0, threading.Lock()]}
        error = expect_raises(
            EncodingError, lambda: self.call(in_worker.fail_on, None, held),
            "an argument that cannot travel is an EncodingError at the caller",
            where=Executor.call_workers, do="Call call.pack(self.codec) before you send anything.",
        )  # fmt: skip
        expect(
            "args[1]['a'][1]" in str(error)
            and wait_until(lambda: self.group.calls.pending == 0),
            "the error names the path to the value, and nothing was sent", seen=str(error),
            where=EncodingError, do="Use the codec of the executor.",
        )  # fmt: skip

    def test_a_result_that_cannot_cross_fails_that_call_alone(self) -> None:
        """And the next one is answered."""
        expect_raises(
            EncodingError, lambda: self.call(in_worker.return_generator),
            "a result that cannot travel is an error of that call", where=EncodingError, do=DELIVER,
        )  # fmt: skip
        expect_equal(
            len(self.call(in_worker.whoami)), self.workers.count,
            "a result that cannot travel is an error of that call alone", where=EncodingError,
            do=DELIVER,
        )  # fmt: skip

    def test_driver_and_worker_share_no_mutable_value(self) -> None:
        """Also where they share a process."""
        mine = ["driver"]
        results = self.call(in_worker.keep_and_change, mine)
        expect(
            mine == ["driver"] and results == [["driver", rank] for rank in self.workers.ranks],
            "arguments and results are copies", seen=f"mine {mine}, results {results}",
            where=Executor.collective_rpc, do="Send call.pack(self.codec), unpacked in the worker.",
        )  # fmt: skip

    def _raised(self, kind: str, *, non_block: bool = False) -> RemoteError:
        def action() -> Any:
            result = self.call(in_worker.raise_error, kind, non_block=non_block)
            return result.result(60) if non_block else result

        error = None
        try:
            action()
        except RemoteError as raised:
            error = raised
        if error is None:
            expect(
                False, "what a worker raises reaches the caller as RemoteError",
                seen="the call returned", where=RemoteError, do=DELIVER,
            )  # fmt: skip
            raise AssertionError
        return error
