"""Executors whose start, health or end is wrong in one way each: the threads of the example, and
``mp`` where workers must be processes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time

from hardpoint.errors import ExecutorFailedError, WorkerDiedError
from hardpoint_multiproc.executor import MultiprocExecutor
from hardpoint_threads.executor import ThreadsExecutor
from mutation import broken

LEAVES_NOTHING = "test_shutdown_is_idempotent_and_leaves_nothing"
FAILED_START = "test_a_start_that_fails_leaves_nothing_and_can_be_tried_again"
LEAKED = []


@broken(
    "health waits until a busy worker is idle", "test_a_long_call_on_a_healthy_worker_is_healthy"
)
class HealthBehindCalls(ThreadsExecutor):
    def probe_health(self, timeout):
        end = time.monotonic() + timeout
        while any(lane.host.result().health().busy_since for lane in self.lanes):
            if time.monotonic() > end:
                raise WorkerDiedError(rank=0, pid=0, exit=None)
            time.sleep(0.01)
        return super().probe_health(timeout)


@broken(
    "an executor that has failed says so to nobody",
    "test_failure_is_told_once_and_at_once_to_late_comers",
)
class FailsInSilence(ThreadsExecutor):
    def register_failure_callback(self, callback):
        pass


@broken(
    "the callback of a failure is called twice",
    "test_failure_is_told_once_and_at_once_to_late_comers",
)
class FailureToldTwice(ThreadsExecutor):
    def register_failure_callback(self, callback):
        super().register_failure_callback(callback)
        super().register_failure_callback(callback)


@broken("shutdown raises when it is called again", LEAVES_NOTHING)
class ShutdownOnce(ThreadsExecutor):
    ended = False

    def shutdown(self, timeout=10.0):
        if self.ended:
            raise ExecutorFailedError("it was shut down already")
        self.ended = True
        super().shutdown(timeout)


@broken("shutdown leaves a child process", LEAVES_NOTHING)
class LeakedProcess(ThreadsExecutor):
    def start_workers(self):
        super().start_workers()
        LEAKED.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))


@broken("shutdown leaves a thread", LEAVES_NOTHING)
class LeakedExecutorThread(ThreadsExecutor):
    def start_workers(self):
        super().start_workers()
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@broken(
    "shutdown waits for as long as a worker is stuck",
    "test_shutdown_keeps_its_deadline_though_a_worker_is_stuck",
)
class NoDeadline(ThreadsExecutor):
    def stop_workers(self, deadline):
        super().stop_workers(deadline + 30)


@broken(
    "a shut down executor takes calls that nobody answers", "test_calls_after_shutdown_are_errors"
)
class TakesCallsAfterTheEnd(ThreadsExecutor):
    def collective_rpc(self, method, **more):
        return [None] * self.world_size if self._closed else super().collective_rpc(method, **more)


@broken("workers are not shut down", "test_the_worker_is_shut_down_once")
class WorkersNotShutDown(ThreadsExecutor):
    def start_workers(self):
        super().start_workers()
        for lane in self.lanes:
            lane.host.result().close = lambda: None


@broken(
    "the workers' shutdown can be called alone", "test_the_workers_shutdown_is_not_called_alone"
)
class ShutdownByName(ThreadsExecutor):
    def collective_rpc(self, method, **more):
        if method == "shutdown":
            return [None] * self.world_size
        return super().collective_rpc(method, **more)


@broken("a start that fails leaves its threads", f"{FAILED_START}[load]")
class StartLeavesThreads(ThreadsExecutor):
    def stop_workers(self, deadline):
        LEAKED.append(self)  # dropped, it would end its threads
        if self.load_reports:
            super().stop_workers(deadline)


@broken(
    "a failure to load is not raised by the start",
    "test_a_failure_of_the_start_is_raised_by_the_start",
)
class StartSwallows(ThreadsExecutor):
    def collective_rpc(self, method, **more):
        from hardpoint.errors import RemoteError

        try:
            return super().collective_rpc(method, **more)
        except RemoteError:
            if method == "load_model":
                return []
            raise


@broken(
    "each worker loads the plugins for itself", "test_plugins_are_visible_once_in_every_process"
)
class PluginsUnseen(ThreadsExecutor):
    def start_workers(self):
        from hardpoint.registry import Registry

        super().start_workers()
        for lane in self.lanes:
            lane.host.result().worker.registry = Registry.from_resolved(())


@broken("engines of one process share their calls", "test_two_engines_in_one_process_share_nothing")
class SharedCalls(ThreadsExecutor):
    shared = None

    def start_workers(self):
        if type(self).shared is not None:
            self.lanes = type(self).shared
            for lane in self.lanes:
                lane.calls = self.calls
            return
        super().start_workers()
        type(self).shared = self.lanes

    def stop_workers(self, deadline):
        super().stop_workers(deadline)
        type(self).shared = None


# Deaths.


@broken("nothing")
class TwinProcesses(MultiprocExecutor):
    """Unbroken."""


@broken(
    "a worker's death is told to nobody",
    "test_a_worker_that_dies_fails_pending_calls_and_turns_health_red",
)
class DeathUnseen(MultiprocExecutor):
    def fail(self, error):
        if not isinstance(error, WorkerDiedError):
            super().fail(error)


@broken(
    "a worker that is silent passes for what it said last",
    "test_a_stopped_worker_does_not_pass_for_healthy",
)
class SilenceIsHealth(MultiprocExecutor):
    reports = ()

    def probe_health(self, timeout):
        with contextlib.suppress(ExecutorFailedError):
            self.reports = super().probe_health(timeout)
        return self.reports

    def fail(self, error):
        if not isinstance(error, ExecutorFailedError):
            super().fail(error)


@broken(
    "an executor starts only in a program that is a file",
    "test_a_driver_that_is_killed_leaves_no_worker",
)
class NeedsAFile(MultiprocExecutor):
    def start_workers(self):
        if not hasattr(sys.modules["__main__"], "__file__"):
            raise ExecutorFailedError("there is no file that a worker could run again")
        super().start_workers()
