"""The older API's way to drive workers (v0), as a mixin for executors.

The driver plans and runs the first worker; the others are in a resident loop,
``start_worker_execution_loop``, in which they get one step after the other until the driver says
that there are no more. While they loop they take nothing but steps: whoever wants something else of
them ends the loop first (:meth:`WorkerLoop.stop_remote_worker_execution_loop`), and the next step
begins another.

An executor mixes it in before :class:`hardpoint.executor.Executor` and gives three methods:
:meth:`WorkerLoop._driver_execute_model`, :meth:`WorkerLoop._run_workers` and
:meth:`WorkerLoop._wait_for_tasks_completion`. Steps may be those of that API
(:class:`hardpoint.v0.messages.ExecuteModelRequest`) or plans.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from hardpoint.errors import LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor
from hardpoint.messages import SchedulerOutput
from hardpoint.v0.conversion import StepConverter
from hardpoint.v0.messages import ExecuteModelRequest, PoolerOutput, SamplerOutput

if TYPE_CHECKING:
    from hardpoint.records import WarmUpReport

LOOP = "start_worker_execution_loop"
"""The call by which workers begin to loop; it is answered when they end."""

OlderOutput = list[SamplerOutput | PoolerOutput]


class WorkerLoop(ABC):
    """The older API's names over three methods. Any thread may call; one step is sent at a time.

    ``parallel_worker_tasks`` is what :meth:`_run_workers` returned for the loop, None while there
    is none.
    """

    parallel_worker_tasks: Any = None

    def __init__(self, *args: Any) -> None:
        self.loop_lock = threading.RLock()
        """Held while the loop is begun or ended, and while something is sent to workers."""
        self.converter = StepConverter()
        super().__init__(*args)

    # For executors to write.

    @abstractmethod
    def _driver_execute_model(
        self, execute_model_req: SchedulerOutput | None, non_block: bool = False
    ) -> Any:
        """Give a step to the looping workers, run it on the driver's, and return its output (with
        ``non_block`` a Future of it); None ends the loop and returns None.
        """

    @abstractmethod
    def _run_workers(
        self,
        method: str,
        *args: Any,
        async_run_tensor_parallel_workers_only: bool = False,
        max_concurrent_workers: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``method`` on all workers and return their values, the driver's first; at most
        ``max_concurrent_workers`` run it at a time (loading, say).

        With ``async_run_tensor_parallel_workers_only`` call all but the driver's and return at
        once, with Futures.
        """

    @abstractmethod
    def _wait_for_tasks_completion(self, parallel_worker_tasks: Any) -> None:
        """Wait for the Futures of :meth:`_run_workers`; raise what a worker raised."""

    # Steps.

    def execute_model(
        self, scheduler_output: SchedulerOutput | ExecuteModelRequest, non_block: bool = False
    ) -> Any:
        """Run one step; return its output, never None. The first one begins the loop.

        A step of the older API gives a list with its SamplerOutput, or PoolerOutput.
        """
        if isinstance(scheduler_output, ExecuteModelRequest):
            if non_block:
                raise UnsupportedError(
                    "non_block", "the older API", hint="Await execute_model_async."
                )
            request = scheduler_output
            return self._older(request, self.execute_model(self.converter.plan(request)))
        if not non_block and self.called_from_worker():  # type: ignore[attr-defined]
            raise LifecycleError(
                "a blocking step from the worker's own thread would wait for itself for ever"
            )
        with self.loop_lock:
            self._begin_loop()
            future: Future[Any] = self._driver_execute_model(scheduler_output, non_block=True)
        return future if non_block else _something(future.result())

    async def execute_model_async(
        self, scheduler_output: SchedulerOutput | ExecuteModelRequest
    ) -> Any:
        """Run one step without holding the event loop. Steps come to every worker in the order in
        which this was called.
        """
        request = scheduler_output
        if isinstance(request, ExecuteModelRequest):
            return self._older(request, await self._planned_async(self.converter.plan(request)))
        return await self._planned_async(request)

    async def _planned_async(self, plan: SchedulerOutput) -> Any:
        with self.loop_lock:
            self._begin_loop()
            step = self._driver_execute_model(plan, non_block=True)
        return _something(await asyncio.wrap_future(step))

    async def _driver_execute_model_async(
        self, execute_model_req: SchedulerOutput | None = None
    ) -> Any:
        """As :meth:`_driver_execute_model`, without holding the event loop."""
        if execute_model_req is None:
            return self._driver_execute_model(None)
        step = self._driver_execute_model(execute_model_req, non_block=True)
        return await asyncio.wrap_future(step)

    def _older(self, request: ExecuteModelRequest, output: Any) -> OlderOutput:
        if output.pooled:
            return [self.converter.pooler_output(request, output)]
        return [self.converter.sampler_output(request, output)]

    # The loop.

    def _begin_loop(self) -> None:
        """Have all workers but the driver's loop, unless they do. Under ``loop_lock``."""
        if self.parallel_worker_tasks is None:
            self.parallel_worker_tasks = self._run_workers(
                LOOP, async_run_tensor_parallel_workers_only=True
            )

    async def _start_worker_execution_loop(self) -> None:
        """Begin the loop, unless there is one, and wait for its end. Cancelled, it ends the loop:
        all workers loop, or none.
        """
        with self.loop_lock:
            self._begin_loop()
            tasks = self.parallel_worker_tasks
        try:
            await asyncio.to_thread(self._wait_for_tasks_completion, tasks)
        except asyncio.CancelledError:
            self.end_loop()
            raise

    def end_loop(self) -> Any:
        """Have the workers leave the loop, without waiting for it; return its tasks, None where
        there was none.
        """
        with self.loop_lock:
            tasks, self.parallel_worker_tasks = self.parallel_worker_tasks, None
            if tasks is not None:
                self._driver_execute_model(None)
        return tasks

    def stop_remote_worker_execution_loop(self) -> None:
        """End the loop and wait until every worker has left it; raise the first thing that one
        raised in it. Nothing where there is none.
        """
        tasks = self.end_loop()
        if tasks is not None:
            self._wait_for_tasks_completion(tasks)

    async def stop_remote_worker_execution_loop_async(self) -> None:
        """As :meth:`stop_remote_worker_execution_loop`, without holding the event loop."""
        tasks = self.end_loop()
        if tasks is not None:
            await asyncio.to_thread(self._wait_for_tasks_completion, tasks)

    # The KV cache.

    def initialize_cache(
        self,
        kv_cache_configs: Sequence[KVCacheConfig] | int,
        num_host_blocks: int = 0,
    ) -> WarmUpReport:
        """Allocate the caches and warm up: by plans, or, as the older API does, by a number of
        device blocks, all of one kind. Host blocks there are none.
        """
        if isinstance(kv_cache_configs, int):
            if num_host_blocks:
                raise UnsupportedError(
                    f"{num_host_blocks} KV blocks of the host",
                    type(self).__name__,
                    hint="Preempt by computing again.",
                )
            specs = self.get_kv_cache_specs()  # type: ignore[attr-defined]
            kv_cache_configs = [uniform_plan(each, kv_cache_configs) for each in specs]
        report: WarmUpReport = super().initialize_cache(kv_cache_configs)  # type: ignore[misc]
        return report


def uniform_plan(specs: Mapping[str, KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    """Return one rank's plan of ``num_blocks`` blocks for layers of one kind. Raises
    UnsupportedError for layers of several, which a number alone does not plan.
    """
    kinds = {(each.kind, each.block_size) for each in specs.values()}
    if len(kinds) > 1:
        raise UnsupportedError(
            "a KV cache of several kinds of layers",
            "the older API",
            hint="Give initialize_cache a plan for each rank.",
        )
    tensors = tuple(
        KVCacheTensor(num_bytes=num_blocks * spec.page_bytes, layers=(layer,))
        for layer, spec in specs.items()
    )
    groups = tuple(
        KVCacheGroup(layers=tuple(specs), spec=spec) for spec in list(specs.values())[:1]
    )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=tensors)


def _something(output: Any) -> Any:
    if output is None:
        raise LifecycleError("the driver's worker gave no output for a step")
    return output
