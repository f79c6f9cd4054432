"""The Executor contract: starts workers, calls them, watches them, ends them. Runs in the driver.

A backend implements four methods: :meth:`Executor.start_workers`, :meth:`Executor.call_workers`,
:meth:`Executor.probe_health` and :meth:`Executor.stop_workers`. All else is written once, here and
in :class:`hardpoint.worker_calls.WorkerCalls`, over :meth:`Executor.collective_rpc`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from attrs import evolve

from hardpoint.errors import ExecutorFailedError, LifecycleError
from hardpoint.isolation import log_error
from hardpoint.rpc.calls import Call, CallTable, Gather
from hardpoint.rpc.channel import ChannelClosedError
from hardpoint.rpc.deadlines import Deadlines
from hardpoint.rpc.encoding import codec_of
from hardpoint.rpc.this_process import THIS
from hardpoint.worker_calls import WorkerCalls

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTicket
    from hardpoint.platform import Platform
    from hardpoint.records import Listener, LoadReport, WorkerHealth
    from hardpoint.registry import Registry
    from hardpoint.rpc.receiver import Receiver

HEALTH_TIMEOUT = 10.0
SHUTDOWN_TIMEOUT = 10.0
INTERRUPT_TIMEOUT = 0.5
"""Seconds for an orderly end when a start is interrupted (Ctrl-C): the prompt is awaited."""


class Prepared(Protocol):
    """What an executor began before it was built."""

    def close(self) -> None:
        """Give it back unused. Idempotent."""


class Executor(WorkerCalls):
    """Calls every worker and gathers their answers.

    Built by :meth:`start` with the complete configuration and the registry whose plugins the
    workers will load.
    """

    supports_pp: ClassVar[bool] = False
    """Whether pipeline stages can be spread over this executor's workers."""
    uses_ray: ClassVar[bool] = False
    supports_async_scheduling: ClassVar[bool] = False

    def __init__(self, config: Config, registry: Registry, platform: Platform) -> None:
        self.config = config
        self.model_config = config.model
        self.cache_config = config.cache
        self.load_config = config.load
        self.parallel_config = config.parallel
        self.scheduler_config = config.scheduler
        self.device_config = config.device
        self.lora_config = config.lora
        self.speculative_config = config.speculative
        self.prompt_adapter_config = config.prompt_adapter
        self.observability_config = config.observability
        self.registry = registry
        self.platform = platform
        self.placement = platform.placement(config)
        self.generation = 0
        self.clock: Callable[[], float] = time.monotonic
        """By which deadlines are counted; a simulator has its own."""
        self.logger = logging.getLogger(f"hardpoint.executor.{type(self).__name__}")
        self.calls = CallTable()
        self.codec = codec_of(config, registry)
        self._deadlines = Deadlines(self.calls.expire)
        self.receiver: Receiver | None = None
        """Set by a backend whose callers take replies from a channel themselves."""
        self.rouse: Callable[[], None] | None = None
        """Set by a backend whose workers may sleep: called when a call is about to be made, so that
        they wake up meanwhile.
        """
        self.prepared: Prepared | None = None
        """What :meth:`prepare` returned, for :meth:`start_workers` to use."""
        self.load_reports: tuple[LoadReport, ...] = ()
        self._failure: BaseException | None = None
        self._failure_callbacks: list[Callable[[BaseException], None]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        super().__init__()

    # For the engine.

    @classmethod
    def prepare(cls, config: Config, registry: Registry, platform: Platform) -> Prepared | None:
        """Begin what takes long and needs no more than is known so far; return at once.

        Called by the engine as soon as it knows the platform and this class, while it still reads
        the model's description: ``config`` has no description and no defaults yet. What it returns
        is given to :meth:`start`, or closed if it does not come to that. Must not raise.
        """
        return None

    @classmethod
    def listeners(
        cls, config: Config, registry: Registry, platform: Platform
    ) -> Sequence[Listener]:
        """Return every socket that would listen in a run, workers' too; called by the doctor."""
        return ()

    @classmethod
    def start(
        cls,
        config: Config,
        registry: Registry,
        platform: Platform,
        prepared: Prepared | None = None,
    ) -> Self:
        """Start the workers, take their devices and load the model; return a working executor.

        ``prepared`` is what :meth:`prepare` returned; it is this executor's from now on. Raises
        what the first failing rank raised (RemoteError); nothing is left running then.
        """
        try:
            executor = cls(config, registry, platform)
            executor.prepared = prepared
        except BaseException:
            if prepared is not None:
                prepared.close()
            raise
        try:
            executor.start_workers()
            executor.collective_rpc("init_device")
            executor.load_reports = tuple(executor.collective_rpc("load_model"))
        except Exception:
            executor.shutdown()
            raise
        except BaseException:
            executor.shutdown(INTERRUPT_TIMEOUT)
            raise
        return executor

    @property
    def max_concurrent_batches(self) -> int:
        """How many steps may be in flight: one per pipeline stage, one more with asynchronous
        scheduling.
        """
        stages = self.parallel_config.pipeline_parallel_size
        return (
            stages + 1
            if self.supports_async_scheduling and self.scheduler_config.async_scheduling
            else stages
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        non_block: bool = False,
        reply_rank: int | None = None,
    ) -> Any:
        """Call ``method`` on every worker and return their values in rank order, exactly world size
        long.

        ``method`` is a worker method's name, or a callable that gets the worker as its first
        argument. With ``reply_rank`` only that rank's value is returned, bare, yet every rank
        acknowledges: the first error of any rank is raised as RemoteError. With ``non_block`` a
        ``concurrent.futures.Future`` of that result is returned at once; ``timeout`` (seconds, for
        the whole call) then bounds it too. After CallTimeoutError the executor still works.
        Messages for control, not for tensors. Raises ExecutorFailedError once the executor has
        failed.
        """
        if method == "shutdown":
            raise LifecycleError("the workers' shutdown is not called alone: executor.shutdown()")
        world_size = self.placement.num_workers
        if reply_rank is not None and not 0 <= reply_rank < world_size:
            raise ValueError(f"reply_rank {reply_rank} is not a rank (world size {world_size})")
        if timeout is not None:
            if not timeout >= 0:
                raise ValueError(f"timeout must be at least 0 seconds, not {timeout!r}")
            if timeout > threading.TIMEOUT_MAX:
                timeout = None  # longer than any wait can be: for ever
        if self._closed or self._failure is not None or THIS.pid != self._pid:
            self._require_alive()
        if (rouse := self.rouse) is not None:
            rouse()
        if not non_block and self.called_from_worker():
            raise LifecycleError(
                "a blocking call from the worker's own thread would wait for itself for ever; use "
                "non_block=True there"
            )
        deadline = None if timeout is None else self.clock() + timeout
        call = Call(
            self.calls.next_id(),
            self.generation,
            method,
            tuple(args),
            dict(kwargs) if kwargs else {},
            reply_rank,
            timeout,
            deadline,
            non_block,
        )
        gather = self.calls.open(call, world_size)
        try:
            self.call_workers(call)
        except BaseException as error:
            self.calls.forget(call.call_id)
            if isinstance(error, ChannelClosedError):  # it had no room when the executor failed
                self._require_alive()
            raise
        if not non_block:
            return self._await(gather, deadline)
        if self.receiver is not None:
            self.receiver.watch()
        if deadline is not None:
            self._deadlines.add(deadline, call.call_id)
        return gather.future

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run one step; return its ModelRunnerOutput, or a StepTicket if it defers sampling; never
        None.

        With ``non_block`` return a Future of that. A worker's error is raised, never encoded in the
        output.
        """
        self.sleep_state.require_awake("execute_model")
        if scheduler_output.generation != self.generation:
            scheduler_output = evolve(scheduler_output, generation=self.generation)
        return self.collective_rpc(
            "execute_model",
            args=(scheduler_output,),
            non_block=non_block,
            reply_rank=self.output_rank,
        )

    def sample_tokens(
        self, ticket: StepTicket, grammar: GrammarOutput | None = None, non_block: bool = False
    ) -> Any:
        """Finish the step of ``ticket``; return its ModelRunnerOutput (or a Future of it)."""
        self.sleep_state.require_awake("sample_tokens")
        return self.collective_rpc(
            "sample_tokens",
            args=(ticket, grammar),
            non_block=non_block,
            reply_rank=self.output_rank,
        )

    async def execute_model_async(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | StepTicket:
        """Run one step without holding the event loop."""
        future = self.execute_model(scheduler_output, non_block=True)
        result: ModelRunnerOutput | StepTicket = await asyncio.wrap_future(future)
        return result

    def check_health(self, timeout: float = HEALTH_TIMEOUT) -> Sequence[WorkerHealth]:
        """Return every worker's own report, by a lane that a busy worker still answers; raise if
        one does not.

        A long step on a healthy worker is healthy. Raises ExecutorFailedError or WorkerDiedError.
        """
        self._require_alive()
        return self.probe_health(timeout)

    async def check_health_async(self, timeout: float = HEALTH_TIMEOUT) -> Sequence[WorkerHealth]:
        """Do as :meth:`check_health` without holding the event loop."""
        return await asyncio.to_thread(self.check_health, timeout)

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        """Have ``callback(error)`` called once when the executor fails, or at once if it has."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._failure_callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> None:
        """End the workers within ``timeout`` seconds and give everything back. Idempotent, safe
        after a failed start. In a forked child it does nothing: the workers are not the child's.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.stop_workers(self.clock() + timeout)
        except BaseException:  # Ctrl-C: whoever waits here waits no longer
            self.stop_workers(self.clock())
            raise
        finally:
            self._deadlines.close()
            self.calls.fail_all(ExecutorFailedError("the executor was shut down"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # For backends.

    @abstractmethod
    def start_workers(self) -> None:
        """Bring up ``world_size`` worker hosts, each with a worker that is built but has no device
        yet.

        A backend that fails here raises the failing rank's own error and leaves nothing behind.
        """

    @abstractmethod
    def call_workers(self, call: Call) -> None:
        """Send ``call`` to every worker, without waiting. Each worker gets its calls in their order
        (several steps are in flight); replies are given to ``self.calls.deliver``, in any order.

        Raises EncodingError for what cannot travel; nothing was sent then.
        """

    @abstractmethod
    def probe_health(self, timeout: float) -> Sequence[WorkerHealth]:
        """Ask every worker host by the control lane; raise WorkerDiedError for one that is gone or
        silent.
        """

    @abstractmethod
    def stop_workers(self, deadline: float) -> None:
        """End the workers by ``deadline`` (monotonic s): let them shut down, then end them. Must
        not raise; interrupted (Ctrl-C), it is called again, with a deadline that has passed.
        """

    def called_from_worker(self) -> bool:
        """Whether the calling thread is the one that serves this executor's calls (only in a
        backend that works in the driver's process).
        """
        return False

    def fail(self, error: BaseException) -> None:
        """Declare the executor failed for good, by the first error; called by backends, from any
        thread, any number.
        """
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            callbacks, self._failure_callbacks = self._failure_callbacks, []
        if self.receiver is not None:
            self.receiver.abandon()
        self.calls.fail_all(error)
        self._deadlines.close()
        tell = partial(
            self.registry.announce, "hardpoint_executor_failed", executor=self, error=error
        )
        for told in (tell, *(partial(callback, error) for callback in callbacks)):
            try:
                told()
            except BaseException as raised:  # noqa: BLE001 - the thread is that of others
                log_error(self.logger, "a failure callback raised", raised)

    @property
    def failure(self) -> BaseException | None:
        """The error by which the executor failed, or None."""
        return self._failure

    def _require_alive(self) -> None:
        if os.getpid() != self._pid:
            raise ExecutorFailedError(
                f"{type(self).__name__} was started by process {self._pid}, and this is process "
                f"{os.getpid()}, forked from it without the threads that serve calls; start a new "
                "executor here"
            )
        if self._closed:
            raise ExecutorFailedError("the executor was shut down; start a new one")
        if self._failure is not None:
            raise ExecutorFailedError(
                f"the executor has failed: {self._failure}"
            ) from self._failure

    def _await(self, gather: Gather, deadline: float | None) -> Any:
        receiver = self.receiver
        ended = gather.wait(deadline) if receiver is None else receiver.wait(gather, deadline)
        if not ended:
            self.calls.expire(gather.call.call_id)
            gather.wait(None)  # if the answer came at the last moment, it is the answer
        return gather.result()
