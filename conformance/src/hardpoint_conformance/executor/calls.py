"""``collective_rpc``: order, broadcast, ids, timeouts, futures."""

from __future__ import annotations

import concurrent.futures
import functools
import operator
import random
import threading
from typing import Any

import pytest
from hardpoint.errors import CallTimeoutError, ExecutorFailedError, LifecycleError, RemoteError
from hardpoint.executor import Executor

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.executor.part import ExecutorPart
from hardpoint_conformance.fresh_process import near_misses
from hardpoint_conformance.watching import PATIENCE, wait_until

WHERE = Executor.collective_rpc


class CallTests(ExecutorPart):
    """What a caller may rely on, whatever is below."""

    def test_a_method_that_is_named_nearly_like_one_of_the_contract_overrides_it(self) -> None:
        """One that is misspelt would never be called."""
        misspelt = near_misses(self.subject.prepare().executor_class, Executor)
        expect(
            not misspelt, "a method that is named nearly like one of the contract overrides it",
            seen=", ".join(misspelt), where=Executor,
            do="Correct the name, or choose one that cannot be taken for it.",
        )  # fmt: skip

    def test_values_come_in_rank_order_one_for_each_worker(self) -> None:
        """Exactly world size long."""
        expect_equal(
            self.group.collective_rpc(operator.attrgetter("rank")), self.workers.ranks,
            "collective_rpc returns one value for each worker, in rank order", where=WHERE,
            do="Deliver each reply with the rank of the worker that made it.",
        )  # fmt: skip

    def test_every_worker_gets_the_arguments(self) -> None:
        """Positional and by name, of a callable of any kind and of a method by its name."""

        def local(worker: Any, more: int) -> int:
            return int(worker.rank) + offset + more

        offset = 10
        wanted = [(rank, (1, "b"), {"c": [2]}) for rank in self.workers.ranks]
        says = "every worker is called with the arguments"
        do = "Send method, args and kwargs as Call.pack gives them, to every worker."
        seen = self.call(in_worker.whoami, 1, "b", kwargs={"c": [2]})
        expect_equal(seen, wanted, says, where=WHERE, do=do)
        for function, args in ((local, (1,)), (functools.partial(local, more=1), ())):
            seen = self.call(function, *args)
            expect_equal(seen, [r + 11 for r in self.workers.ranks], says, where=WHERE, do=do)
        seen = self.group.collective_rpc("supported_tasks")
        expect_equal(len(seen), self.workers.count, says, where=WHERE, do=do)

    def test_calls_run_in_the_order_in_which_they_were_made(self) -> None:
        """Several are in flight; each worker gets its calls in their order."""
        folder = self.subject.scratch("order")
        for number in range(8):
            self.call(in_worker.append_line, str(folder), number, non_block=True)
        self.call(in_worker.whoami)
        for rank in self.workers.ranks:
            lines = (folder / f"lines-{rank}").read_text().split()
            expect_equal(
                lines, [str(number) for number in range(8)],
                "each worker gets its calls in their order", where=Executor.call_workers,
                do="Send by one lane for each worker, without overtaking.",
            )  # fmt: skip

    def test_reply_rank_gives_one_bare_value_though_all_work(self) -> None:
        """Every rank acknowledges, one sends."""
        folder = self.subject.scratch("all-work")
        for rank in self.workers.ranks:
            expect_equal(
                self.call(in_worker.whoami, reply_rank=rank), (rank, (), {}),
                "with reply_rank only that rank's value is returned, bare", where=WHERE,
                do="Pass reply_rank on with the call; WorkerHost sends the value or leaves it out.",
            )  # fmt: skip
        self.call(in_worker.touch, str(folder / "ran"), reply_rank=0)
        expect_equal(
            len(list(folder.iterdir())), self.workers.count,
            "with reply_rank every rank works all the same", where=WHERE,
            do="Send the call to every worker.",
        )  # fmt: skip

    def test_an_error_of_a_rank_that_need_not_reply_is_raised(self) -> None:
        """Never swallowed."""
        last = self.workers.count - 1
        error = self._remote(lambda: self.call(in_worker.fail_on, last, reply_rank=0))
        expect_equal(
            error.rank, last, "the first error of any rank reaches the caller, with its rank",
            where=WHERE, do="Deliver every rank's acknowledgement, its failure too.",
        )  # fmt: skip
        self._still_answers()

    # Timeouts.

    def test_after_a_timeout_the_next_call_gets_its_own_answer(self) -> None:
        """A late reply answers nobody else."""
        gate = self.gate("timeout")
        expect_raises(
            CallTimeoutError,
            lambda: self.call(in_worker.pass_gate, *gate.args, timeout=0.2),
            "a call that is not answered in time raises CallTimeoutError", where=WHERE,
            do="Leave timeouts to the base class: do not wait in call_workers.",
        )  # fmt: skip
        later = self.call(in_worker.whoami, "mine", non_block=True)
        gate.open()
        expect_equal(
            later.result(PATIENCE), [(rank, ("mine",), {}) for rank in self.workers.ranks],
            "after CallTimeoutError the executor still works, and the late reply is dropped",
            where=WHERE, do="Deliver replies with the call_id that they came with.",
        )  # fmt: skip
        expect(
            wait_until(lambda: self.group.calls.pending == 0),
            "a call that timed out is forgotten when its late replies have come",
            seen=f"{self.group.calls.pending} calls pending", where=WHERE,
            do="Deliver every reply to self.calls, late ones too.",
        )  # fmt: skip

    def test_a_timeout_bounds_futures_too(self) -> None:
        """CallTimeoutError is a TimeoutError as well."""
        gate = self.gate("bounded")
        future = self.call(in_worker.pass_gate, *gate.args, timeout=0.1, non_block=True)
        error = future.exception(PATIENCE)
        gate.open()
        expect(
            isinstance(error, CallTimeoutError),
            "timeout bounds a call with non_block, too", seen=repr(error), where=WHERE,
            do="Leave it to the base class; do not replace the future.",
        )  # fmt: skip
        self._still_answers()

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_an_impossible_timeout_is_refused(self, timeout: float) -> None:
        """Before anything is sent."""
        expect_raises(
            ValueError, lambda: self.call(in_worker.whoami, timeout=timeout),
            "a timeout is at least 0 seconds", where=WHERE, do="Leave it to the base class.",
        )  # fmt: skip

    # Futures.

    def test_a_future_completes_by_itself(self) -> None:
        """Without anybody waiting for it."""
        done = threading.Event()
        future = self.call(in_worker.whoami, non_block=True)
        expect(
            isinstance(future, concurrent.futures.Future),
            "with non_block a concurrent.futures.Future is returned at once", seen=type(future),
            where=WHERE, do="Return what the base class returns.",
        )  # fmt: skip
        future.add_done_callback(lambda _: done.set())
        expect(
            done.wait(PATIENCE) and future.done(), "a future completes by itself",
            seen="its callback was not called", where=WHERE,
            do="Receive replies on a thread, or set self.receiver.",
        )  # fmt: skip

    def test_results_may_be_taken_in_any_order(self) -> None:
        """Each future has its own call's."""
        futures = [self.call(in_worker.whoami, n, non_block=True) for n in range(20)]
        order = list(range(20))
        random.Random(1).shuffle(order)  # noqa: S311
        for number in order:
            expect_equal(
                futures[number].result(PATIENCE)[0][1], (number,),
                "a future has the result of its own call", where=WHERE,
                do="Deliver replies by call_id, not by arrival.",
            )  # fmt: skip

    def test_a_call_that_is_cancelled_while_it_queues_never_runs(self) -> None:
        """One that runs cannot be cancelled."""
        gate, folder = self.gate("cancel"), self.subject.scratch("cancelled")
        running = self.call(in_worker.pass_gate, *gate.args, non_block=True)
        gate.entered(self.workers.count)
        queued = self.call(in_worker.touch, str(folder / "ran"), non_block=True)
        cancelled = queued.cancel()
        gate.open()
        running.result(PATIENCE)
        self.call(in_worker.whoami)
        ran = [path.name for path in folder.iterdir()]
        expect(
            cancelled and not ran,
            "a call that was cancelled while it queued never runs",
            seen=f"cancel() said {cancelled}; it ran on {ran or 'no rank'}", where=WHERE,
            do="Ask self.calls.begin(call_id), or tell the workers that a call is given up.",
        )  # fmt: skip

    def test_many_calls_that_fail_time_out_or_succeed_match_their_ids(self) -> None:
        """A hundred, mixed."""
        source = random.Random(5)  # noqa: S311 - a mix, not a secret
        gate = self.gate("many")
        held = self.call(in_worker.pass_gate, *gate.args, timeout=0.01, non_block=True)
        pending = {}
        for number in range(100):
            fail = source.random() < 0.3
            pending[number] = (
                self.call(in_worker.echo_or_fail, number, fail, non_block=True), fail
            )  # fmt: skip
            if source.random() < 0.1:
                self.call(in_worker.echo_or_fail, -1, False, timeout=0, non_block=True)
        gate.open()
        held.exception(PATIENCE)
        numbers = list(pending)
        source.shuffle(numbers)
        for number in numbers:
            future, fail = pending[number]
            if fail:
                cause = future.exception(PATIENCE).__cause__
                seen, wanted = list(getattr(cause, "args", ())), [number]
            else:
                seen, wanted = future.result(PATIENCE), [number] * self.workers.count
            expect_equal(
                seen, wanted, "a late or failed call never answers another", where=WHERE,
                do="Deliver replies by call_id.",
            )  # fmt: skip

    def test_a_large_argument_travels(self) -> None:
        """8 MiB."""
        expect_equal(
            set(self.call(in_worker.length_of, bytes(8 << 20))), {8 << 20},
            "values of any size travel", where=WHERE, do="Chunk what does not fit your channel.",
        )  # fmt: skip

    def test_the_workers_shutdown_is_not_called_alone(self) -> None:
        """It would leave the executor half alive."""
        expect_raises(
            LifecycleError, lambda: self.group.collective_rpc("shutdown"),
            "workers are shut down by executor.shutdown()", where=Executor.shutdown,
            do="Do not override collective_rpc.",
        )  # fmt: skip
        self._still_answers()

    def _still_answers(self) -> None:
        expect_equal(
            self.group.collective_rpc(operator.attrgetter("rank")), self.workers.ranks,
            "an error that every rank acknowledged belongs to that call alone",
            where=ExecutorFailedError, do="Go on serving calls after one that raised.",
        )  # fmt: skip

    def _remote(self, action: Any) -> RemoteError:
        error = expect_raises(
            RemoteError, action, "what a worker raises is a RemoteError at the caller",
            where=RemoteError, do="Deliver the Reply of WorkerHost.handle as it is.",
        )  # fmt: skip
        if not isinstance(error, RemoteError):
            raise TypeError(error)
        return error
