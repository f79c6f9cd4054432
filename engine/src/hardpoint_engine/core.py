"""The engine core: holds requests, plans steps, has them executed, gives out what they yield.

It keeps as many steps in flight as the executor takes (``max_concurrent_batches``), so that every
stage of a pipeline has one, and takes in their results in the order of the steps.

Runs in the driver and has no thread of its own (LLM gives it one). ``step`` is called by
one thread at a time; everything else by any thread at any time, also while a step runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attrs import define, evolve
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config import Config
from hardpoint.errors import ConfigError, ExecutorFailedError, HardpointError, InvalidRequestError
from hardpoint.executor import HEALTH_TIMEOUT, SHUTDOWN_TIMEOUT, Executor
from hardpoint.messages import MessageError, ModelRunnerOutput, SchedulerOutput, StepTicket
from hardpoint.platform import Platform
from hardpoint.records import LoadReport, WorkerHealth

from hardpoint_engine.graph_table import print_table
from hardpoint_engine.idling import Idling, give_way
from hardpoint_engine.metrics import EngineMetrics
from hardpoint_engine.request import EngineOutput, EngineRequest, Request
from hardpoint_engine.scheduling.admission import AdmissionPolicy
from hardpoint_engine.scheduling.intake import Intake, Seeds
from hardpoint_engine.scheduling.kv_planning import KVPlan
from hardpoint_engine.scheduling.parts import (
    make_blocks,
    make_limits,
    make_request_checks,
    named,
    processor_names,
)
from hardpoint_engine.scheduling.scheduler import Scheduler
from hardpoint_engine.scheduling.stopping import FinishReason, StopRule
from hardpoint_engine.step_trace import trace_step
from hardpoint_engine.structured.structured_requests import (
    DeferredStep,
    StructuredRequests,
    send_later,
)

if TYPE_CHECKING:
    from hardpoint.registry import Registry

    from hardpoint_engine.timeline.timeline import Timeline

_logger = logging.getLogger("hardpoint.engine")

GoesOn = Callable[[list[EngineOutput]], bool]
"""Says, of outputs before they are given out, if a step is wanted whatever becomes of them."""


@define(eq=False)
class _Flight:
    """A step that the workers have."""

    plan: SchedulerOutput
    future: Future[ModelRunnerOutput | StepTicket] | DeferredStep
    planned: float
    started: float


class EngineCore:
    """The driver's heart. Built by :func:`hardpoint_engine.build.start_engine`.

    ``config`` is complete, with the fitted ``max_model_len``. The core owns ``executor`` and shuts
    it down. ``clock()`` gives monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        platform: Platform,
        executor: Executor,
        plan: KVPlan,
        *,
        admission: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.description is None or config.model.max_model_len is None:
            raise ConfigError("the engine core needs the model's description and max_model_len")
        self.config = config
        self.registry = registry
        self.platform = platform
        self.executor = executor
        self.kv_plan = plan
        self.description: ModelDescription = config.description
        self.max_model_len: int = config.model.max_model_len
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(
            make_limits(config, platform),
            make_blocks(config, self.description, plan),
            clock=clock,
            num_groups=plan.num_groups,
            admission=admission,
            depth=executor.max_concurrent_batches,
            tells_tokens=config.parallel.pipeline_parallel_size > 1,
            processors=processor_names(config, registry, platform),
        )
        self._clock = clock
        self._intake = Intake(
            platform=platform,
            vocab_size=self.description.vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=config.sampling.max_logprobs,
            processors=make_request_checks(config, registry, platform),
            configured=tuple(map(named, config.sampling.logits_processors)),
        )
        seed = config.model.seed
        self._seeds = Seeds(executor.draw_seed() if seed is None else seed)
        self._structured = StructuredRequests(self.scheduler.roster, at_once=executor.plans_alike)
        self._lock = threading.RLock()
        self._flights: deque[_Flight] = deque()
        self._idling = Idling(clock)
        self._versions = dict(executor.sleep_state.versions)
        self._ready_generation: int | None = None
        self._closed = False
        self._timeline: Timeline | None = None
        self._paused = False
        self._unsent: Exception | None = None

    # Requests.

    def check_request(self, request: EngineRequest) -> None:
        """Raise what ``add_request`` would raise of this request by itself. Changes nothing."""
        self._require_alive()
        self._intake.check(request)

    def add_request(self, request: EngineRequest, *, checked: bool = False) -> None:
        """Let a request wait for its turn; ``checked`` says that ``check_request`` let it pass. Any
        thread, any time.

        Raises InvalidRequestError or UnsupportedError if it cannot be served, ExecutorFailedError
        if the engine has ended; then nothing has changed for anybody else.
        """
        if not checked:
            self._intake.check(request)
        with self._lock:
            self._require_alive()
            if request.req_id in self.scheduler.roster:
                raise InvalidRequestError(
                    f"request id {request.req_id!r} is taken by a request that has not ended",
                    field="req_id",
                    value=request.req_id,
                )
            rule = StopRule.of(
                request.sampling,
                len(request.prompt),
                self.description.eos_token_ids,
                self.max_model_len,
            )
            ready = request.grammar is None
            added = self.scheduler.roster.add(self._seeds.complete(request), rule, ready=ready)
            if not ready:
                self._structured.add(added)
            self.metrics.requests += 1

    def abort(
        self, req_id: str, reason: FinishReason = "abort", stop_reason: int | str | None = None
    ) -> bool:
        """End a request in whatever state, also while a step computes it; False if it is unknown or
        has ended. Its last output, with this finish reason, comes from the next ``step``.
        """
        with self._lock:
            return self.scheduler.roster.end(req_id, reason, stop_reason=stop_reason)

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do or to give."""
        roster = self.scheduler.roster
        return bool(len(roster) or roster.has_outputs or self._flights)

    # Steps.

    def step(self, goes_on: GoesOn | None = None) -> list[EngineOutput]:
        """Have as many steps in flight as there may be, wait for the oldest, and return what it
        gave, and the last outputs of requests that ended otherwise since. Never raises what a step
        raised: that ends the requests in the step, with the error, and the engine goes on as long
        as its executor lives. Steps before it are not touched, later ones end by their own results.

        Interrupted (KeyboardInterrupt), steps go on at the workers, and the next call waits for
        them. Raises SleepStateError, changing nothing, while something the step needs sleeps;
        ExecutorFailedError once the engine has ended and every request has had its last output.

        With ``goes_on`` the next step is sent as soon as this one is taken in, if that says so.
        """
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            raise unsent
        with self._lock:
            flight = self._fill()
        if flight is None:
            outputs = self._give()
            if not outputs and self.has_unfinished():
                preparing = bool(len(self._structured))
                self._idling.wait(self.scheduler, paused=self._paused, preparing=preparing)
            return outputs
        self._idling.end()
        result: ModelRunnerOutput | StepTicket | Exception
        try:
            result = flight.future.result()
        except Exception as error:  # noqa: BLE001 - whatever a step raises ends its requests
            result = error
        return self._land(flight, result, goes_on)

    def _fill(self) -> _Flight | None:
        """Have as many steps in flight as there may be; return the oldest."""
        while len(self._flights) < self.scheduler.depth and self._launch():
            pass
        return self._flights[0] if self._flights else None

    def _launch(self) -> bool:
        """Plan a step and send it; False if there is nothing to compute, or if what is in flight
        must land first.
        """
        roster = self.scheduler.roster
        if self._flights and not self._undisturbed():
            return False
        if not self.alive:
            roster.end_all("error", self._end_cause())
            if not roster.has_outputs:
                self._require_alive()
            return False
        if self._paused or not len(roster):
            return False
        self.executor.sleep_state.require_awake("a step")
        self._notice_changes()
        self._structured.settle()
        planned = self._clock()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        due = self._structured.due(plan)
        if due:
            plan = evolve(plan, defer_sampling=True)
        self.registry.announce("hardpoint_step_started", scheduler_output=plan, rank=None)
        started = self._clock()
        try:
            future = self.executor.execute_model(plan, non_block=True)
        except Exception as error:  # noqa: BLE001 - a step that could not be sent is a failed one
            future = Future()
            future.set_exception(error)
        result = self._choose(plan, future, due) if due else future
        self._flights.append(_Flight(plan, result, planned, started))
        return True

    def _choose(
        self,
        plan: SchedulerOutput,
        first: Future[ModelRunnerOutput | StepTicket],
        due: Mapping[str, Request],
    ) -> DeferredStep:
        """Send the second phase of a step, whose masks are made while workers compute the first.
        Sent before the next step, it comes before it at every worker.
        """
        grammar = self._structured.masks(due)
        ticket = StepTicket(step_id=plan.step_id, generation=self.executor.generation)
        return send_later(
            first, lambda: self.executor.sample_tokens(ticket, grammar, non_block=True)
        )

    def _undisturbed(self) -> bool:
        """Whether a step may join those in flight: the executor lives, nothing sleeps, and no cache
        was lost (its blocks are taken back only when no step has them).
        """
        state = self.executor.sleep_state
        return (
            self.alive
            and state.is_awake
            and state.versions["kv_cache"] == self._versions["kv_cache"]
        )

    def _land(
        self,
        flight: _Flight,
        result: ModelRunnerOutput | StepTicket | Exception,
        goes_on: GoesOn | None,
    ) -> list[EngineOutput]:
        """Take in the result of a step, or its failure; count it when the next is on its way."""
        with self._lock:
            if not self._flights or self._flights[0] is not flight:  # shut down meanwhile
                return self._give()
            self._flights.popleft()
            landed = self._clock()
            output: ModelRunnerOutput | None = None
            try:
                output = self._checked(result)
                outputs = self.scheduler.commit(flight.plan, output)
                self._ready_generation = output.generation
            except Exception as error:  # noqa: BLE001 - typed, to the requests of the step
                outputs = self.scheduler.fail(flight.plan, error)
                self._ready_generation = None
            done = None if self._ready_generation is None else output
            outputs = self.scheduler.roster.take_ended() + outputs
            taken = self._clock()
            seconds = taken - flight.started
        self.registry.announce(
            "hardpoint_step_finished", scheduler_output=flight.plan, output=output, rank=None
        )
        if goes_on is not None:
            self._go_on(outputs, goes_on, seconds)
        with self._lock:
            self.metrics.step_done(flight.plan, done, seconds)
            self._count(outputs)
            if self._timeline is not None:
                self._timeline.step(
                    flight.plan, done,
                    planned=flight.planned, sent=flight.started, landed=landed, done=taken,
                )  # fmt: skip
        trace_step(flight.plan, done, seconds)
        return outputs

    def _go_on(self, outputs: list[EngineOutput], goes_on: GoesOn, seconds: float) -> None:
        """Send the next step if that is wanted. What it raises, the next ``step`` raises."""
        try:
            if self._policy_observes or not goes_on(outputs):
                return
            with self._lock:
                sent = self._undisturbed() and self._fill()
            if sent:
                give_way(seconds)
        except Exception as error:  # noqa: BLE001 - see above
            self._unsent = error

    def _checked(self, result: ModelRunnerOutput | StepTicket | Exception) -> ModelRunnerOutput:
        if isinstance(result, Exception):
            raise result
        if not isinstance(result, ModelRunnerOutput):
            raise MessageError(f"a step gave {result!r}, not a ModelRunnerOutput")
        if result.generation != self.executor.generation:
            raise MessageError(
                f"a step's result is of generation {result.generation}, the workers are of "
                f"{self.executor.generation}"
            )
        return result

    def _give(self) -> list[EngineOutput]:
        """Return the last outputs of requests that ended otherwise than by a step."""
        with self._lock:
            outputs = self.scheduler.roster.take_ended()
            self._count(outputs)
            return outputs

    def _count(self, outputs: list[EngineOutput]) -> None:
        """Count what is given out, and show it to the policy. Under the lock."""
        scheduler = self.scheduler
        self.metrics.outputs_given(outputs)
        self.metrics.look(scheduler.roster, scheduler.blocks)
        if self._timeline is not None:
            self._timeline.ended(outputs)
        if self._policy_observes:
            self._show(scheduler.admission, outputs)

    @property
    def _policy_observes(self) -> bool:
        """Whether the admission policy decides by what it was shown of earlier steps."""
        return type(self.scheduler.admission).observe is not AdmissionPolicy.observe

    def _show(self, policy: AdmissionPolicy, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            try:
                policy.observe(output)
            except Exception:
                name = type(policy).__qualname__
                _logger.exception("admission policy %s raised in observe", name)

    # The cache and the weights.

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings, here and at the workers. Running requests keep
        theirs.
        """
        with self._lock:
            self._require_alive()
            self.scheduler.blocks.clear_cache()
        self.executor.reset_prefix_cache()

    def reload_weights(
        self, path: str | None = None, *, keep_cache: bool = False
    ) -> list[LoadReport]:
        """Load all weights again, from ``path`` or from where they came, and let no request find
        what older weights computed, unless ``keep_cache`` says that they are the same.
        """
        reports = self.executor.reload_weights(path)
        if keep_cache:
            with self._lock:
                self._versions["weights"] = self.executor.sleep_state.versions["weights"]
        return reports

    def weights_changed(self) -> None:
        """Say that the workers' weights were replaced by other means (a collective call)."""
        with self._lock:
            self.scheduler.blocks.weight_epoch += 1

    def _notice_changes(self) -> None:
        """Adopt what happened to the workers' memory since the last step."""
        versions = self.executor.sleep_state.versions
        if versions == self._versions:
            return
        if versions["weights"] != self._versions["weights"]:
            self.scheduler.blocks.weight_epoch += 1
        if versions["kv_cache"] != self._versions["kv_cache"]:
            self.scheduler.preempt_all()
            self.scheduler.blocks.clear_cache()
        self._versions = dict(versions)

    def pause(self) -> None:
        """Begin no step until :meth:`resume`; those in flight land. Idempotent."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Begin steps again. Raises SleepStateError unless all memory is there and defined."""
        with self._lock:
            self.executor.sleep_state.require_awake("scheduling")
            self._paused = False

    # How it is.

    @property
    def paused(self) -> bool:
        """Whether scheduling sleeps."""
        return self._paused

    def watch(self, timeline: Timeline | None) -> None:
        """Have steps and requests drawn from now on; None: no longer."""
        with self._lock:
            self._timeline = timeline

    @property
    def alive(self) -> bool:
        """Whether the engine can still compute: not shut down, its executor not failed."""
        return not self._closed and self.executor.failure is None

    @property
    def ready(self) -> bool:
        """Whether it has shown that it computes: the last step of this generation of workers was a
        success.
        """
        return self.alive and self._ready_generation == self.executor.generation

    @property
    def healthy(self) -> bool:
        """Whether every worker answers now, by the lane that a busy one still answers."""
        try:
            self.check_health()
        except HardpointError:
            return False
        return True

    def check_health(self, timeout: float = HEALTH_TIMEOUT) -> Sequence[WorkerHealth]:
        """Return every worker's report; raise ExecutorFailedError or WorkerDiedError."""
        self._require_alive()
        return self.executor.check_health(timeout)

    def _end_cause(self) -> BaseException:
        return self.executor.failure or ExecutorFailedError("the engine was shut down")

    def _require_alive(self) -> None:
        if not self.alive:
            cause = self._end_cause()
            raise ExecutorFailedError(f"the engine has ended: {cause}") from cause

    # The end.

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the workers within ``timeout`` seconds and give everything back. Requests that have
        not ended are aborted: one more ``step`` gives their last outputs. Idempotent.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._flights.clear()
                self.scheduler.roster.in_flight.clear()
                self.scheduler.roster.end_all("abort")
                if self.config.graph.graph_stats:
                    print_table(self.metrics.graphs)
        self.executor.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
