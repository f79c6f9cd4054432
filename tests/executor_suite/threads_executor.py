"""An executor that nobody installed: a thread for each rank. Named by class and by reference."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import ClassVar

from hardpoint.errors import WorkerDiedError
from hardpoint.executor import Executor
from hardpoint.records import WorkerContext
from hardpoint.rpc.host import WorkerHost
from hardpoint.rpc.worker_thread import WorkerThread


def _build(executor_parts, rank, cancelled):
    config, platform, registry, worker_class, model_runner, world_size, meeting = executor_parts
    context = WorkerContext(
        config=config,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        rendezvous=f"file:///proc/self/fd/{meeting}",
        model_runner=model_runner,
        cancelled=cancelled,
    )
    return WorkerHost(context, platform, registry, worker_class)


def _release(threads):
    for thread in threads:
        thread.release()


class ThreadsExecutor(Executor):
    """Any number of workers, each on its own thread of this process."""

    supports_pp: ClassVar[bool] = True
    _threads: tuple[WorkerThread, ...] = ()
    _leave = staticmethod(lambda: None)

    def start_workers(self):
        asked = (self.config, self.platform)
        chosen = (self.registry.worker_class(*asked), self.registry.model_runner_class(*asked))
        meeting = os.memfd_create("threads-rendezvous")
        self._leave = weakref.finalize(self, os.close, meeting)
        parts = (self.config, self.platform, self.registry, *chosen, self.world_size, meeting)
        died = weakref.WeakMethod(self.fail)
        self._threads = tuple(
            WorkerThread(
                partial(_build, parts, rank),
                self.calls,
                self._deadlines,
                lambda error: (fail := died()) and fail(error),
            )
            for rank in range(self.world_size)
        )
        self._finalizer = weakref.finalize(self, _release, self._threads)
        for thread in self._threads:
            thread.start()

    def call_workers(self, call):
        packed = call.pack(self.codec)
        for thread in self._threads:
            thread.submit(packed)

    def probe_health(self, timeout):
        reports = [thread.health() for thread in self._threads]
        for rank, report in enumerate(reports):
            if report is None:
                raise WorkerDiedError(rank=rank, pid=os.getpid(), exit=None)
        return reports

    def stop_workers(self, deadline):
        for thread in self._threads:
            thread.stop(deadline)
        self._leave()

    def called_from_worker(self):
        return any(thread.is_current() for thread in self._threads)
