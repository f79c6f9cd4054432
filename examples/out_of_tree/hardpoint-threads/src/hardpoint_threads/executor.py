"""The executor: four methods, and the thread that serves one worker."""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import Future
from queue import SimpleQueue

from hardpoint.errors import ConfigError, WorkerDiedError
from hardpoint.executor import Executor
from hardpoint.records import WorkerContext, WorkerHealth
from hardpoint.rpc.calls import Call, PackedCall
from hardpoint.rpc.host import WorkerHost


class ThreadsExecutor(Executor):
    """Runs every worker on a thread of its own, in this process."""

    supports_pp = True
    lanes: tuple[Lane, ...] = ()
    left = staticmethod(lambda: None)

    def start_workers(self) -> None:
        """Build every worker; raise what building the first that failed raised."""
        asked = [self.platform.environment(self.config, self.placement)]
        asked += [self.registry.worker_env(self.config, rank) for rank in range(self.world_size)]
        for name, value in (pair for each in asked for pair in each.items()):
            if os.environ.get(name) != value:
                raise ConfigError(f"executor = 'threads': start this process with {name}={value}")
        self.left = weakref.finalize(self, os.close, meeting := os.memfd_create("threads"))
        self.lanes = tuple(Lane(self, rank, meeting) for rank in range(self.world_size))
        for lane in self.lanes:
            weakref.finalize(self, lane.leave)  # an executor that is dropped ends its threads
            lane.start()
        for lane in self.lanes:
            lane.host.result()

    def call_workers(self, call: Call) -> None:
        """Queue the call for every worker, packed: they share nothing mutable with the driver."""
        packed = call.pack(self.codec)
        for lane in self.lanes:
            lane.inbox.put(packed)

    def probe_health(self, timeout: float) -> list[WorkerHealth]:
        """Read what each worker's host wrote of its progress."""
        for lane in self.lanes:
            if not lane.is_alive():
                raise WorkerDiedError(rank=lane.context.rank, pid=os.getpid(), exit=None)
        return [lane.host.result().health() for lane in self.lanes]

    def stop_workers(self, deadline: float) -> None:
        """Have the threads leave their work and shut their workers down."""
        for lane in self.lanes:
            lane.leave()
        for lane in self.lanes:
            if lane.ident is not None and lane is not threading.current_thread():
                lane.join(max(0.0, deadline - time.monotonic()))
        self.left()

    def called_from_worker(self) -> bool:
        """Whether the calling thread is a worker's."""
        return threading.current_thread() in self.lanes


class Lane(threading.Thread):
    """One worker's thread. It does not hold the executor, so that a dropped one can go."""

    def __init__(self, executor: ThreadsExecutor, rank: int, meeting: int) -> None:
        super().__init__(name=f"threads-{rank}", daemon=True)
        config, platform, registry = executor.config, executor.platform, executor.registry
        self.calls, self.stopping = executor.calls, threading.Event()
        self.inbox: SimpleQueue[PackedCall | None] = SimpleQueue()
        self.host: Future[WorkerHost] = Future()
        self.context = WorkerContext(
            config=config, rank=rank, local_rank=rank, world_size=executor.world_size,
            rendezvous=f"file:///proc/self/fd/{meeting}",
            model_runner=registry.model_runner_class(config, platform),
            generation=executor.generation, cancelled=self.stopping.is_set,
        )  # fmt: skip
        self.parts = platform, registry, registry.worker_class(config, platform)

    def leave(self) -> None:
        """Run no queued call any more."""
        self.stopping.set()
        self.inbox.put(None)

    def run(self) -> None:
        """Build the worker here, serve its calls, shut it down."""
        try:
            self.host.set_result(host := WorkerHost(self.context, *self.parts))
        except BaseException as error:  # noqa: BLE001 - raised again where start_workers waits
            return self.host.set_exception(error)
        while (call := self.inbox.get()) is not None:
            if not self.stopping.is_set() and self.calls.begin(call.call_id):
                self.calls.deliver(host.handle(call))  # which never raises
        host.close()
