"""Health, death, shutdown, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hardpoint.errors import ExecutorFailedError, HardpointError, WorkerDiedError
from hardpoint.executor import Executor
from hardpoint.registry import Registry

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.executor.part import ExecutorPart
from hardpoint_conformance.watching import (
    PATIENCE,
    Traces,
    left_after,
    shared_files,
    wait_until,
)


class LifeTests(ExecutorPart):
    """From the first call to nothing."""

    def test_a_long_call_on_a_healthy_worker_is_healthy(self) -> None:
        """The control lane is another one than that of the calls."""
        gate = self.gate("busy")
        held = self.call(in_worker.pass_gate, *gate.args, non_block=True)
        gate.entered(self.workers.count)
        try:
            reports = self.group.check_health(timeout=10)
        finally:
            gate.open()
        held.result(PATIENCE)
        busy = [report.busy_since is not None for report in reports]
        expect(
            [report.rank for report in reports] == self.workers.ranks and all(busy),
            "check_health has every worker's own report, by a lane that a busy worker still "
            "answers", seen=reports, where=Executor.check_health,
            do="Read WorkerHost.health() from another thread than that of the calls.",
        )  # fmt: skip
        expect_equal(
            [report.busy_since for report in self.group.check_health()],
            [None] * self.workers.count, "a worker without a call is not busy",
            where=Executor.check_health, do="Return WorkerHost.health() as it is.",
        )  # fmt: skip

    def test_a_worker_that_dies_fails_pending_calls_and_turns_health_red(self) -> None:
        """The failure callback is called once, with the rank and how it ended."""
        group = self.start()
        pids = self.require_processes(group)
        heard: list[BaseException] = []
        group.register_failure_callback(heard.append)
        gate = self.gate("death")
        held = group.collective_rpc(in_worker.pass_gate, args=gate.args, non_block=True)
        gate.entered(self.workers.count)
        last = len(pids) - 1
        self.subject.probe.kill(pids[last])
        error = self._settled(held)
        gate.open()
        expect(
            isinstance(error, WorkerDiedError) and error.rank == last,
            "a worker's death fails all pending calls with WorkerDiedError and its rank",
            seen=f"rank {last} was killed; the pending call has {error!r}",
            where=Executor.fail, do="Watch every process; call self.fail(WorkerDiedError)."
        )  # fmt: skip
        for ask in (group.check_health, lambda: group.collective_rpc("supported_tasks")):
            expect_raises(
                ExecutorFailedError, ask, "an executor that failed says so",
                where=Executor.check_health, do="Call self.fail; the base class does the rest.",
            )  # fmt: skip
        expect_equal(
            len(heard), 1, "a failure callback is called once, when the executor fails",
            where=Executor.register_failure_callback, do="Call self.fail; it is told once.",
        )  # fmt: skip
        before = frozenset(pids)
        self.subject.end(group)
        self._expect_gone(before)

    def test_a_stopped_worker_does_not_pass_for_healthy(self) -> None:
        """SIGSTOP: it is there, and answers nothing."""
        group = self.start()
        pids = self.require_processes(group)
        os.kill(pids[-1], signal.SIGSTOP)
        try:
            expect(
                wait_until(lambda: not self._healthy(group)),
                "a worker that is stopped does not stay healthy",
                seen=f"check_health still returned {PATIENCE:g} s after SIGSTOP",
                where=Executor.check_health,
                do="Let every worker's process answer for itself, within the timeout.",
            )
        finally:
            os.kill(pids[-1], signal.SIGCONT)
        self.subject.end(group)
        self._expect_gone(frozenset(pids))

    def test_failure_is_told_once_and_at_once_to_late_comers(self) -> None:
        """Whoever registers later hears it, too."""
        group = self.start()
        heard: list[BaseException] = []
        group.register_failure_callback(heard.append)
        error = WorkerDiedError(rank=0, pid=1, exit=-9)
        group.fail(error)
        group.fail(RuntimeError("a later one"))
        group.register_failure_callback(heard.append)
        expect(
            heard == [error, error] and group.failure is error,
            "the first error is the executor's failure; each callback hears it once", seen=heard,
            where=Executor.fail, do="Do not override fail.",
        )  # fmt: skip
        self.subject.end(group)

    # Shutdown.

    def test_shutdown_is_idempotent_and_leaves_nothing(self) -> None:
        """No process, thread, shared memory, or open file; twice over, as the first start may keep
        something for the next.
        """
        self.subject.end(self.start())
        before = Traces.now()
        group = self.start()
        pids = frozenset(self.pids(group)) - {os.getpid()}
        segments = shared_files(pids | {os.getpid()})
        group.shutdown()
        group.shutdown()
        self.subject.end(group)
        self._expect_gone(pids)
        del group
        left = left_after(before, 10) + [str(path) for path in segments if path.exists()]
        expect(
            not left, "shutdown leaves no process, thread, shared memory or open file",
            seen=", ".join(left), where=Executor.shutdown,
            do="Join what start_workers started, and close every end of the channels.",
        )  # fmt: skip

    def test_calls_after_shutdown_are_errors(self) -> None:
        """Health, too."""
        group = self.start()
        group.shutdown()
        for ask in (group.check_health, lambda: group.collective_rpc("supported_tasks")):
            expect_raises(
                ExecutorFailedError, ask, "an executor that was shut down says so",
                where=Executor.shutdown, do="Do not override shutdown: implement stop_workers.",
            )  # fmt: skip

    def test_the_worker_is_shut_down_once(self) -> None:
        """However often the executor is."""
        group = self.start()
        path = self.subject.scratch("shut") / "shutdown"
        group.collective_rpc(in_worker.leave_at_shutdown, args=(str(path),))
        group.shutdown()
        group.shutdown()
        for rank in range(group.world_size):
            file = path.with_name(f"shutdown-{rank}")
            wait_until(file.exists)
            expect_equal(
                file.read_text().split() if file.exists() else [], ["shutdown"],
                "Worker.shutdown is called once", where=Executor.stop_workers,
                do="Call WorkerHost.close() before the worker's process or thread ends.",
            )  # fmt: skip

    def test_shutdown_keeps_its_deadline_though_a_worker_is_stuck(self) -> None:
        """And the call that was stuck ends with an error."""
        group = self.start()
        pids = frozenset(self.pids(group)) - {os.getpid()}
        gate = self.gate("stuck")
        held = group.collective_rpc(in_worker.pass_gate, args=gate.args, non_block=True)
        gate.entered(group.world_size)
        began = time.monotonic()
        group.shutdown(timeout=0.5)
        took = time.monotonic() - began
        error = self._settled(held)
        gate.open()
        self.subject.end(group)
        expect(
            took < PATIENCE / 2 and isinstance(error, HardpointError),
            "shutdown ends the workers within its timeout, and pending calls with an error",
            seen=f"it took {took:.1f} s of 0.5; the call has {error!r}",
            where=Executor.shutdown, do="End what does not leave by the deadline.",
        )  # fmt: skip
        self._expect_gone(pids)

    @pytest.mark.parametrize("point", ["build", "init_device", "load"])
    def test_a_start_that_fails_leaves_nothing_and_can_be_tried_again(self, point: str) -> None:
        """Whatever stage it had come to."""
        self.keys()
        self.subject.end(self.start())
        before = Traces.now()
        try:
            self.start(**{"plugins.dummy.fail_at": point})
        except (HardpointError, ValueError):
            pass
        else:
            expect(
                False, "start raises what a rank raised", seen=f"{point} failed, start returned",
                where=Executor.start, do="Wait for every rank's acknowledgement.",
            )  # fmt: skip
        left = left_after(before, 10)
        expect(
            not left, "a start that fails leaves nothing behind", seen=", ".join(left),
            where=Executor.start_workers, do="Undo what was started when a rank fails.",
        )  # fmt: skip
        self.subject.end(self.start())

    def test_a_driver_that_is_killed_leaves_no_worker(self) -> None:
        """SIGKILL at the driver, which can tidy nothing."""
        self.require_processes(self.group)
        code = DRIVER.format(name=self.subject.name, settings=self.subject.settings,
                             keys=self.keys())  # fmt: skip
        driver = subprocess.Popen(  # noqa: S603 - this interpreter, the kit's own program
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        if driver.stdout is None:
            raise TypeError("no pipe")
        try:
            line = driver.stdout.readline()
        finally:
            driver.kill()
            _, errors = driver.communicate()
        pids = frozenset(map(int, line.split()))
        expect(
            pids, "an executor starts in any program that asks for it",
            seen=f"a program of a few lines ended before: {errors[-300:]}", where=Executor.start,
            do="Need nothing that this process happens to have: no module, guard or variable.",
        )  # fmt: skip
        self._expect_gone(pids, "a driver that is killed at any moment leaves no process")

    # Plugins.

    def test_plugins_are_visible_once_in_every_process(self) -> None:
        """Exactly the driver's, of the same versions."""
        wanted = sorted(
            (each.kind, each.name, each.distribution, each.version)
            for each in self.group.registry.resolved()
        )
        for rank, seen in enumerate(self.call(in_worker.plugins)):
            expect_equal(
                sorted(map(tuple, seen)), wanted,
                f"workers load exactly the driver's plugins, once (rank {rank})",
                where=Registry.from_resolved,
                do="Hand registry.resolved() to every worker process and build its Registry by "
                "from_resolved.",
            )  # fmt: skip

    def test_two_engines_in_one_process_share_nothing(self) -> None:
        """One ends, the other goes on."""
        one, two = self.start(), self.start()
        one.shutdown()
        expect_equal(
            len(two.collective_rpc("supported_tasks")), two.world_size,
            "two executors in one process share nothing", where=Executor,
            do="Keep no module-level state.",
        )  # fmt: skip
        self.subject.end(one)
        self.subject.end(two)

    def test_calls_from_many_threads_each_get_their_own_answer(self) -> None:
        """Eight threads, forty calls each."""
        wrong: list[Any] = []

        def ask(thread: int) -> None:
            for number in range(40):
                answer = self.call(in_worker.whoami, thread, number)
                if any(each[1] != (thread, number) for each in answer):
                    wrong.append((thread, number, answer))

        threads = [threading.Thread(target=ask, args=(each,)) for each in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(
            not wrong, "an executor may be called from any thread", seen=wrong[:1],
            where=Executor.collective_rpc, do="Guard what threads share in call_workers.",
        )  # fmt: skip

    @staticmethod
    def _healthy(group: Executor) -> bool:
        try:
            group.check_health(timeout=2)
        except ExecutorFailedError:
            return False
        return True

    @staticmethod
    def _settled(future: Any) -> BaseException | None:
        try:
            error: BaseException | None = future.exception(PATIENCE)
        except TimeoutError:
            return None
        return error

    def _expect_gone(self, pids: frozenset[int], says: str = "shutdown leaves no process") -> None:
        live = self.subject.probe.live_children
        wait_until(lambda: not live(pids))
        expect(
            not live(pids), says, seen=f"alive: {sorted(live(pids))}", where=Executor.shutdown,
            do="Signal and wait for the processes that were started, to the last one; have workers "
            "end with their driver.",
        )  # fmt: skip


DRIVER = """
from hardpoint_conformance import in_worker
from hardpoint_conformance.subject import Subject
subject = Subject({name!r}, kind="executor", settings={settings!r})
executor = subject.ready(None, **{keys!r})
print(*executor.collective_rpc(in_worker.pid), flush=True)
import time
time.sleep(600)
"""
