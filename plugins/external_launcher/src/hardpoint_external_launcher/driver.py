"""``external_launcher`` with ``driver_only``: rank 0 decides, and the others loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.errors import ExecutorFailedError
from hardpoint.rpc.calls import Call
from hardpoint.v0.worker_loop import LOOP, WorkerLoop

from hardpoint_external_launcher.executor import ExternalLauncherExecutor
from hardpoint_external_launcher.programs import LOOPED, LeaderProgram

if TYPE_CHECKING:
    from hardpoint.messages import SchedulerOutput


class DriverExecutor(WorkerLoop, ExternalLauncherExecutor):
    """Rank 0 alone makes calls; steps go to the others' resident loop, everything else ends that
    loop first. Every rank acknowledges every step, so an error of any rank is that step's.
    """

    plans_alike: ClassVar[bool] = False

    def call_workers(self, call: Call) -> None:
        """Have all ranks' workers run ``call``."""
        with self.loop_lock:
            if call.method not in LOOPED:
                self.end_loop()  # what a step raised, its caller has been told
            super().call_workers(call)

    def _driver_execute_model(
        self, execute_model_req: SchedulerOutput | None, non_block: bool = False
    ) -> Any:
        if execute_model_req is None:
            self._leader().end_loop()
            return None
        return ExternalLauncherExecutor.execute_model(self, execute_model_req, non_block)

    def _run_workers(
        self,
        method: str,
        *args: Any,
        async_run_tensor_parallel_workers_only: bool = False,
        max_concurrent_workers: int | None = None,
        **kwargs: Any,
    ) -> Any:
        ranks = range(self.world_size)
        if async_run_tensor_parallel_workers_only:
            return [self._call_ranks(ranks[1:], method, args, kwargs)]
        if max_concurrent_workers is None or max_concurrent_workers >= len(ranks):
            return self.collective_rpc(method, args=args, kwargs=kwargs)
        if max_concurrent_workers < 1:
            raise ValueError(f"max_concurrent_workers is {max_concurrent_workers}, not at least 1")
        values: list[Any] = []
        for first in ranks[::max_concurrent_workers]:
            part = ranks[first : first + max_concurrent_workers]
            answers = self._call_ranks(part, method, args, kwargs).result()
            values += [answers[rank] for rank in part]
        return values

    def _wait_for_tasks_completion(self, parallel_worker_tasks: Sequence[Future[Any]]) -> None:
        for task in parallel_worker_tasks:
            task.result()

    def _call_ranks(
        self, ranks: Sequence[int], method: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Call some workers; the values of the others are None."""
        self._require_alive()
        with self.loop_lock:
            if method != LOOP:
                self.end_loop()
            call = Call(self.calls.next_id(), self.generation, method, tuple(args), kwargs)
            gather = self.calls.open(call, self.world_size)
            try:
                self._leader().call_ranks(call, ranks)
            except BaseException:
                self.calls.forget(call.call_id)
                raise
            return gather.future

    def _leader(self) -> LeaderProgram:
        program = None if self._group is None else self._group.program
        if not isinstance(program, LeaderProgram):
            raise ExecutorFailedError("rank 0 alone makes calls (driver_only = true)")
        return program
