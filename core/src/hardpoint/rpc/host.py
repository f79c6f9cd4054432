"""The worker's side of remote calls: one host around one worker, in the worker's process.

The host makes, for every plugin alike, the checks that a worker need not make: order of life,
capability, sleep state, generation, known method. A channel gives it calls, one at a time; its
health may be read from any thread at any time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hardpoint.errors import (
    HardpointError,
    LifecycleError,
    PluginConflictError,
    UnsupportedError,
)
from hardpoint.isolation import log_error
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput, StepTicket
from hardpoint.records import LoadReport, SavedFile, SleepReport, WorkerContext, WorkerHealth
from hardpoint.references import resolve_class
from hardpoint.rpc import codec
from hardpoint.rpc.calls import PackedCall, Reply
from hardpoint.rpc.encoding import codec_of
from hardpoint.rpc.exclusive import ExclusiveClaim
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.lifecycle import CAPABILITIES, STEPS, Lifecycle, Stage
from hardpoint.service_arguments import profile_arguments
from hardpoint.sleep import SleepState, check_tags
from hardpoint.worker import Worker

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig
    from hardpoint.messages import GrammarOutput
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

_loads, _loads_plain, _PICKLED = codec.loads, codec.loads_plain, codec.PICKLED
_NO_NAMES: Mapping[str, Any] = {}
_logger = logging.getLogger("hardpoint.worker")

_NOTHING_MOVED = SleepReport(bytes_freed=0, bytes_backed_up=0)
_MOST_WAITING = 8


class UnknownMethodError(HardpointError, AttributeError):
    """No worker method of that name; the message has the worker's class and close matches.

    What to do: correct the name, or install the plugin that offers it through
    ``hardpoint_worker_methods``.
    """


class WorkerHost:
    """Builds one worker, calls it, watches it, ends it.

    ``worker_reference`` is a class or a reference to one. Construction raises what the worker's
    construction raised, UnsupportedError if the platform is exclusive and taken, and
    PluginConflictError for worker methods that clash. All methods but :meth:`health` belong to the
    one thread that serves the channel.
    """

    def __init__(
        self,
        context: WorkerContext,
        platform: Platform,
        registry: Registry,
        worker_reference: str | type[Worker],
    ) -> None:
        self.context = context
        self.platform = platform
        self.registry = registry
        self.lifecycle = Lifecycle()
        self.sleep_state = SleepState()
        self._step_id = -1
        self._others = 0  # calls that were no steps
        self._busy_since: float | None = None
        self._waiting: dict[int, SchedulerOutput] = {}
        self._bound: dict[str, Callable[..., Any]] = {}
        self._ready: dict[str, Callable[..., Any]] = {}  # those that this stage allows at any time
        self._rank = context.rank
        self._generation = context.generation
        self._codec = codec_of(context.config, registry)
        claim = ExclusiveClaim(platform.name) if platform.exclusive else None
        self._claim = claim
        try:
            self.worker = self._build(worker_reference)
            self._own = self._own_methods()
            self._offered = self._offered_methods()
        except BaseException:
            if claim is not None:
                claim.release()
            raise

    def handle(self, call: PackedCall, *, carried: bool = False) -> Reply:
        """Run one call and acknowledge it, with its value if this rank was asked for one. Never
        raises. With ``carried`` the value is left as it is (``Reply.of``), for a channel's end to
        encode.
        """
        rank = self._rank
        self._busy_since = time.monotonic()
        try:
            value = self._run(call)
            if value is not None:
                asked = call.reply_rank
                if asked is not None and asked != rank:
                    value = None
                elif carried:
                    return Reply(call.call_id, rank, call.generation, value, None, call.name or "?")
                else:
                    value = self._codec.pack(value, f"result of {call.name!r}")
            return Reply(call.call_id, rank, call.generation, value)
        except BaseException as error:  # noqa: BLE001 - every rank acknowledges every call
            return Reply(
                call_id=call.call_id,
                rank=rank,
                generation=call.generation,
                failure=RemoteFailure.of(error, encode=self._codec.encode_exception),
            )
        finally:
            self._busy_since = None

    def health(self) -> WorkerHealth:
        """Return the progress of the work loop, as the loop wrote it. Any thread may ask."""
        return WorkerHealth(
            rank=self.context.rank, step_id=self._step_id, busy_since=self._busy_since
        )

    def close(self) -> None:
        """Shut the worker down, once; what that raises is logged. Idempotent."""
        if self.lifecycle.stage is Stage.CLOSED:
            return
        self.lifecycle.stage = Stage.CLOSED
        self._ready.clear()
        for action in (self._announce_closing, self.worker.shutdown):
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - what it holds is given back below
                log_error(_logger, f"rank {self.context.rank}: closing the worker raised", error)
        if self._claim is not None:
            self._claim.release()

    # Construction.

    def _build(self, reference: str | type[Worker]) -> Worker:
        chosen = resolve_class(reference, Worker) if isinstance(reference, str) else reference
        return chosen(self.context, self.platform, self.registry)

    def _own_methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods for which the host does more than forward."""
        return {
            "init_device": self._init_device,
            "load_model": self._load_model,
            "initialize_from_config": self._initialize_from_config,
            "execute_model": self._execute_model,
            "sample_tokens": self._sample_tokens,
            "execute_dummy_batch": self._execute_dummy_batch,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "discard": self._discard,
            "reload_weights": self._reload_weights,
            "save_sharded_state": self._save_sharded_state,
            "apply_model": self._apply_model,
            "profile": self._profile,
            "shutdown": self.close,
        }

    def _offered_methods(self) -> dict[str, Callable[..., Any]]:
        """Return the plugins' worker methods, for this instance alone; no class is changed."""
        offered = dict(self.registry.worker_methods())
        for name in offered:
            if name in self._own or hasattr(type(self.worker), name) or name.startswith("_"):
                raise PluginConflictError(
                    f"a plugin offers the worker method {name!r}, but "
                    f"{type(self.worker).__qualname__} has that name already; rename it"
                )
        return offered

    # Calls.

    def _run(self, call: PackedCall) -> Any:
        if call.generation != self._generation:
            raise LifecycleError(
                f"{call.name!r} is of generation {call.generation}, this worker is of "
                f"{self._generation}"
            )
        body = call.body
        method: str | Callable[..., Any]
        args: Sequence[Any]
        if type(body) is bytes:
            try:
                if body[0] != _PICKLED:
                    method, args, kwargs = call.name, _loads_plain(body), _NO_NAMES
                else:
                    method, args, kwargs = _loads(body)
            except BaseException as error:
                raise codec.unusable("arguments", call.name, error) from error
        else:
            method, args, kwargs = call.unpack()
        self._others += method != "execute_model"
        if type(method) is str and (function := self._ready.get(method)) is not None:
            return function(*args, **kwargs)
        if not isinstance(method, str):
            self._require_callables()
            self.lifecycle.require_open(call.name)
            return method(self.worker, *args, **kwargs)
        function = self._bound.get(method)
        if function is None:
            function = self._bound[method] = self._lookup(method)
        self.lifecycle.require(method)
        if (capability := CAPABILITIES.get(method)) is not None:
            self.platform.require(capability)
        value = function(*args, **kwargs)
        stage = self.lifecycle.stage
        self.lifecycle.done(method)
        if self.lifecycle.stage is not stage:
            self._ready.clear()
        elif capability is None and method not in STEPS.values():
            self._ready[method] = function
        return value

    def _require_callables(self) -> None:
        """Raise UnsupportedError if the configuration lets no functions be sent: a call that came
        here all the same is not run.
        """
        if not self._codec.callables:
            raise UnsupportedError(
                "functions sent to workers", self._codec.refused_by, hint="Call a method by name."
            )

    def _lookup(self, name: str) -> Callable[..., Any]:
        if not name.startswith("_"):
            if name in self._own:
                return self._own[name]
            if name in self._offered:
                return partial(self._offered[name], self.worker)
            # Looked up on the class, so that no attribute that happens to be callable is reached.
            if callable(getattr(type(self.worker), name, None)):
                bound: Callable[..., Any] = getattr(self.worker, name)
                return bound
        raise UnknownMethodError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        from difflib import get_close_matches

        kind = type(self.worker)
        names = {n for n in dir(kind) if callable(getattr(kind, n, None))}
        known = sorted(n for n in names | {*self._own, *self._offered} if not n.startswith("_"))
        private = "names that begin with '_' cannot be called; " if name.startswith("_") else ""
        near = get_close_matches(name, known, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        return (
            f"worker {kind.__module__}.{kind.__qualname__} has no method {name!r}: {private}{hint}"
        )

    # The methods for which the host does more than forward.

    def _init_device(self) -> None:
        self.worker.init_device()
        self.registry.announce("hardpoint_worker_started", worker=self.worker)

    def _load_model(self) -> LoadReport:
        report = self.worker.load_model()
        self.registry.announce("hardpoint_model_loaded", worker=self.worker)
        return report

    def _initialize_from_config(self, plans: Sequence[KVCacheConfig]) -> None:
        """Pass this rank its own plan of the plans of all ranks."""
        if len(plans) != self.context.world_size:
            raise LifecycleError(
                f"initialize_from_config: {len(plans)} plans for {self.context.world_size} ranks"
            )
        self.worker.initialize_from_config(plans[self.context.rank])

    def _apply_model(self, function: Callable[..., Any], *args: Any) -> Any:
        self._require_callables()
        return function(self.worker.get_model(), *args)

    def _profile(
        self,
        is_start: bool,
        prefix: str | None = None,
        delay_iterations: int = 0,
        max_iterations: int | None = None,
    ) -> None:
        given = profile_arguments(type(self.worker), prefix, delay_iterations, max_iterations)
        self.worker.profile(is_start, **given)

    def _execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        self.sleep_state.require_awake("execute_model")
        if scheduler_output.generation != self.context.generation:
            raise LifecycleError(
                f"step {scheduler_output.step_id} is of generation {scheduler_output.generation}, "
                f"this worker is of {self.context.generation}"
            )
        self._step_id = step_id = scheduler_output.step_id
        self.registry.announce(
            "hardpoint_step_started", scheduler_output=scheduler_output, rank=self._rank
        )
        output: ModelRunnerOutput | StepTicket | None = None
        self.worker.other_calls = self._others
        try:
            output = self.worker.execute_model(scheduler_output)
            self._check_step(step_id, output, "execute_model")
        finally:
            self.worker.other_calls = None
            if isinstance(output, StepTicket):
                self._waiting[step_id] = scheduler_output
                if len(self._waiting) > _MOST_WAITING:  # tickets that the driver gave up
                    del self._waiting[min(self._waiting)]
            else:
                self._announce_finished(scheduler_output, output)
        return output

    def _sample_tokens(
        self, ticket: StepTicket, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        self.sleep_state.require_awake("sample_tokens")
        scheduler_output = self._waiting.pop(ticket.step_id, None)
        if scheduler_output is None or ticket.generation != self.context.generation:
            waiting = ", ".join(map(str, self._waiting)) or "none"
            raise LifecycleError(
                f"sample_tokens: step {ticket.step_id} does not wait for sampling (waiting: "
                f"{waiting}); call execute_model with defer_sampling first"
            )
        output: ModelRunnerOutput | None = None
        try:
            output = self.worker.sample_tokens(ticket, grammar)
            self._check_step(ticket.step_id, output, "sample_tokens")
        finally:
            self._announce_finished(scheduler_output, output)
        return output

    def _check_step(self, step_id: int, output: object, method: str) -> None:
        kinds = (ModelRunnerOutput, *(() if method == "sample_tokens" else (StepTicket,)))
        if not isinstance(output, kinds) or output.step_id != step_id:
            kind = type(self.worker)
            raise LifecycleError(
                f"{kind.__module__}.{kind.__qualname__}.{method} returned {output!r:.200} for step "
                f"{step_id}; it must return that step's output"
            )

    def _announce_finished(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput | None
    ) -> None:
        self.registry.announce(
            "hardpoint_step_finished",
            scheduler_output=scheduler_output,
            output=output if isinstance(output, ModelRunnerOutput) else None,
            rank=self.context.rank,
        )

    def _announce_closing(self) -> None:
        self.registry.announce("hardpoint_worker_closing", worker=self.worker)

    def _execute_dummy_batch(self) -> None:
        self.sleep_state.require_awake("execute_dummy_batch")
        self.worker.execute_dummy_batch()

    # Sleep, for this rank alone; the driver keeps the same machine for the group.

    def _sleep(self, level: int) -> SleepReport:
        if self.sleep_state.has_slept(level):
            return _NOTHING_MOVED
        self.sleep_state.partial(check_tags(None), weights_dropped=level == 2)
        report = self.worker.sleep(level)
        self.sleep_state.slept(level)
        return report

    def _wake_up(self, tags: Sequence[str]) -> SleepReport:
        chosen = tuple(tag for tag in check_tags(tags) if tag in self.sleep_state.sleeping_tags)
        if not chosen:
            return _NOTHING_MOVED
        self.sleep_state.partial(chosen)
        report = self.worker.wake_up(chosen)
        self.sleep_state.woke(chosen)
        return report

    def _discard(self, tags: Sequence[str]) -> SleepReport:
        chosen = check_tags(tags)
        self.sleep_state.partial(chosen, weights_dropped="weights" in chosen)
        report = self.worker.discard(chosen)
        self.sleep_state.discarded(chosen)
        return report

    def _reload_weights(self, path: str | None = None) -> LoadReport:
        self.sleep_state.begin_reload()
        report = self.worker.reload_weights(path)
        self.sleep_state.reloaded()
        return report

    def _save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> Sequence[SavedFile]:
        self.sleep_state.require_weights("save_sharded_state")
        return self.worker.save_sharded_state(path, pattern, max_size)
