"""Executors that are wrong in one way each: the threads of the example, with one part changed."""

from __future__ import annotations

import threading

from attrs import asdict, define, evolve
from hardpoint.errors import ExecutorFailedError
from hardpoint.rpc.calls import PackedCall
from hardpoint.rpc.failures import RemoteFailure
from hardpoint_threads.executor import ThreadsExecutor
from hardpoint_uniproc.executor import UniProcExecutor
from mutation import broken

MATCH = "test_many_calls_that_fail_time_out_or_succeed_match_their_ids"
TOLD = "test_a_remote_error_has_type_rank_traceback_notes_and_the_original"


class Tampered(ThreadsExecutor):
    """Threads whose replies a mutant may change: :meth:`reply` in place of what the host said."""

    def start_workers(self):
        super().start_workers()
        real = self.calls

        class Between:
            begin = staticmethod(real.begin)

            @staticmethod
            def deliver(reply):
                changed = self.reply(reply)
                if changed is not None:
                    real.deliver(changed)

        for lane in self.lanes:
            lane.calls = Between

    def reply(self, reply):
        return reply


@broken("nothing")
class TwinThreads(Tampered):
    """Unbroken."""


@broken("nothing")
class TwinUni(UniProcExecutor):
    """Unbroken."""


@broken(
    "the method that reports health is misspelt",
    "test_a_method_that_is_named_nearly_like_one_of_the_contract_overrides_it",
)
class MisspeltHealth(UniProcExecutor):
    def probe_heatlh(self, timeout):
        raise ExecutorFailedError("the device is gone")


# Steps.


@broken(
    "records of plugins in extra do not travel with a plan", "test_a_plan_arrives_as_it_was_sent"
)
class PlanWithoutRecords(UniProcExecutor):
    def execute_model(self, scheduler_output, non_block=False):
        return super().execute_model(evolve(scheduler_output, extra={}), non_block)


# Replies.


@broken("a reply is given to the call after, and the other way round", MATCH)
class SwappedReplies(Tampered):
    kept = None

    def reply(self, reply):
        if reply.rank or reply.call_id < 40:
            return reply
        kept, self.kept = self.kept, None
        if kept is None:
            self.kept = reply
            return None
        self.calls.deliver(evolve(kept, call_id=reply.call_id))
        return evolve(reply, call_id=kept.call_id)


@broken(
    "an exception of a rank other than 0 is swallowed",
    "test_an_error_of_a_rank_that_need_not_reply_is_raised",
)
class SwallowedError(Tampered):
    def reply(self, reply):
        return evolve(reply, failure=None) if reply.rank and reply.failure else reply


@broken(
    "replies say they are of another rank", "test_values_come_in_rank_order_one_for_each_worker"
)
class RanksMixed(Tampered):
    def reply(self, reply):
        return evolve(reply, rank=self.world_size - 1 - reply.rank)


@broken("exceptions come as text", TOLD)
class ErrorsAsText(Tampered):
    def reply(self, reply):
        if reply.failure is None:
            return reply
        failure = RemoteFailure.of(RuntimeError("worker raised an error"))
        return evolve(reply, failure=failure)


@broken(
    "every value comes back, whoever was asked",
    "test_reply_rank_gives_one_bare_value_though_all_work",
)
class AllValues(ThreadsExecutor):
    def collective_rpc(
        self, method, *, args=(), kwargs=None, timeout=None, non_block=False, reply_rank=None
    ):
        del reply_rank
        return super().collective_rpc(
            method, args=args, kwargs=kwargs, timeout=timeout, non_block=non_block
        )


# Calls.


class _NewestFirst:
    """A queue that gives what waits in the wrong order."""

    def __init__(self):
        self.waiting, self.there = [], threading.Condition()

    def put(self, call):
        with self.there:
            self.waiting.append(call)
            self.there.notify()

    def get(self):
        with self.there:
            self.there.wait_for(lambda: self.waiting)
            return self.waiting.pop(0 if self.waiting[-1] is None else -1)


@broken("the newest call is run first", "test_calls_run_in_the_order_in_which_they_were_made")
class LastInFirstOut(ThreadsExecutor):
    def start_workers(self):
        super().start_workers()
        for lane in self.lanes:
            old, lane.inbox = lane.inbox, _NewestFirst()
            old.put(_Nothing)


class _Nothing:
    """A call that nobody made: it has the thread look at its other queue."""

    call_id = -1


@define
class _NotPacked(PackedCall):
    given: tuple = ()

    def unpack(self):
        return self.given


@broken("arguments are not copied", "test_driver_and_worker_share_no_mutable_value")
class SharedArguments(ThreadsExecutor):
    def call_workers(self, call):
        values = asdict(call.pack(self.codec), recurse=False) | {"body": ()}
        packed = _NotPacked(**values, given=(call.method, call.args, call.kwargs))
        for lane in self.lanes:
            lane.inbox.put(packed)


@broken("functions get no arguments on the second rank", "test_every_worker_gets_the_arguments")
class ArgumentsForTheFirst(ThreadsExecutor):
    def call_workers(self, call):
        whole = call.pack(self.codec)
        bare = whole if isinstance(call.method, str) else evolve(call, args=()).pack(self.codec)
        for lane in self.lanes:
            lane.inbox.put(bare if lane.context.rank else whole)


@broken("a timeout is ignored", "test_after_a_timeout_the_next_call_gets_its_own_answer")
class NoTimeouts(ThreadsExecutor):
    def collective_rpc(
        self, method, *, args=(), kwargs=None, timeout=None, non_block=False, reply_rank=None
    ):
        return super().collective_rpc(
            method, args=args, kwargs=kwargs, non_block=non_block, reply_rank=reply_rank
        )


@broken("any timeout is taken", "test_an_impossible_timeout_is_refused")
class AnyTimeout(ThreadsExecutor):
    def collective_rpc(self, method, *, timeout=None, **more):
        wrong = timeout is not None and not timeout >= 0
        return super().collective_rpc(method, timeout=None if wrong else timeout, **more)


@broken(
    "a call that was cancelled is run all the same",
    "test_a_call_that_is_cancelled_while_it_queues_never_runs",
)
class CancelledButRun(ThreadsExecutor):
    def start_workers(self):
        super().start_workers()
        real = self.calls

        class Between:
            deliver = staticmethod(real.deliver)

            @staticmethod
            def begin(call_id):
                real.begin(call_id)
                return True

        for lane in self.lanes:
            lane.calls = Between


@broken(
    "after a timeout nothing works any more",
    "test_after_a_timeout_the_next_call_gets_its_own_answer",
)
class TimeoutIsTheEnd(ThreadsExecutor):
    def collective_rpc(self, method, **more):
        try:
            return super().collective_rpc(method, **more)
        except TimeoutError as error:
            self.fail(ExecutorFailedError(f"a call timed out: {error}"))
            raise


@broken(
    "what cannot travel is replaced by None",
    "test_an_argument_that_cannot_cross_is_named_and_nothing_is_sent",
)
class UnsendableIsNone(ThreadsExecutor):
    def call_workers(self, call):
        from hardpoint.errors import EncodingError

        try:
            super().call_workers(call)
        except EncodingError:
            super().call_workers(evolve(call, args=tuple(None for _ in call.args), kwargs={}))


@broken("a future is complete only when somebody waits for it", "test_a_future_completes_by_itself")
class LazyFutures(Tampered):
    def collective_rpc(self, method, *, non_block=False, **more):
        if not non_block:
            return super().collective_rpc(method, **more)
        from concurrent.futures import Future

        executor = self

        class Lazy(Future):
            def result(self, timeout=None):
                if not self.done():
                    self.set_result(executor.collective_rpc(method, **more))
                return super().result(timeout)

        return Lazy()


@broken(
    "a step that fails is an empty output", "test_a_failing_step_fails_alone_and_is_never_an_output"
)
class FailureIsAnOutput(ThreadsExecutor):
    def execute_model(self, scheduler_output, non_block=False):
        from hardpoint.errors import RemoteError
        from hardpoint.messages import ModelRunnerOutput

        try:
            return super().execute_model(scheduler_output, non_block)
        except RemoteError:
            return ModelRunnerOutput(step_id=scheduler_output.step_id)


@broken(
    "a step of an earlier generation is run, and its reply accepted",
    "test_a_step_of_another_generation_is_refused",
)
class OldGenerationServed(ThreadsExecutor):
    def call_workers(self, call):
        def current(value):
            old = hasattr(value, "step_id") and hasattr(value, "generation")
            return evolve(value, generation=self.generation) if old else value

        super().call_workers(
            evolve(call, generation=self.generation, args=tuple(map(current, call.args)))
        )
