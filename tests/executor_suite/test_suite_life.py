"""Health, failure, shutdown, and what is left afterwards (rows X13, X14, X18, V6)."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import (
    CancelledStepError,
    ExecutorFailedError,
    RemoteError,
    UnsupportedError,
    WorkerDiedError,
)
from hardpoint.rpc.calls import Call


def ours():
    """The threads and processes that executors have started and not ended; those that Ray has to
    spare, which it starts and ends when it likes, are its own.
    """
    threads = {t for t in threading.enumerate() if t.name.startswith("hardpoint-")}
    processes = psutil.Process().children(recursive=True)
    return threads | {each for each in processes if not is_spare(each)}


def is_spare(process):
    try:
        command = " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return False
    except psutil.NoSuchProcess:
        return True
    return command.startswith("ray::IDLE") or "default_worker.py" in command


def test_a_long_call_on_a_healthy_worker_is_healthy(group, gate, steps, world_size):
    assert [report.busy_since for report in group.check_health()] == [None] * world_size
    plan = steps.new()
    group.execute_model(plan)
    began = time.monotonic()
    held = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    gate.wait_entered(world_size)
    for rank, report in enumerate(group.check_health(timeout=1)):
        assert (report.rank, report.step_id) == (rank, plan.step_id)
        assert began <= report.busy_since <= time.monotonic()
    gate.open()
    held.result(60)
    group.collective_rpc("supported_tasks")
    assert [report.busy_since for report in group.check_health()] == [None] * world_size


def test_failure_is_told_once_and_at_once_to_late_comers(group):
    heard, late = [], []
    group.register_failure_callback(heard.append)
    group.register_failure_callback(lambda error: 1 / 0)
    error = WorkerDiedError(rank=1, pid=1234, exit=-9, last_lines=["Killed"])
    group.fail(error)
    group.fail(RuntimeError("a later one"))
    assert heard == [error]
    assert "rank 1 (pid 1234) ended by signal 9" in str(error)
    group.register_failure_callback(late.append)
    assert late == [error]
    assert group.failure is error
    with pytest.raises(ExecutorFailedError, match="the executor has failed") as caught:
        group.collective_rpc("supported_tasks")
    assert caught.value.__cause__ is error
    with pytest.raises(ExecutorFailedError):
        group.check_health()


def test_failure_ends_every_pending_call_once(group, gate):
    futures = [group.collective_rpc(gate.passing, args=gate.args, non_block=True)]
    futures += [group.collective_rpc("supported_tasks", non_block=True) for _ in range(5)]
    error = WorkerDiedError(rank=0, pid=1, exit=1)
    group.fail(error)
    assert [future.exception(60) for future in futures] == [error] * 6
    assert group.calls.pending == 0


def test_registration_races_with_failure_and_each_is_told_exactly_once(launcher):
    for _ in range(5):
        group = launcher.loaded()
        heard = []
        barrier = threading.Barrier(3)

        def register(group=group, heard=heard, barrier=barrier):
            barrier.wait()
            for _ in range(20):
                group.register_failure_callback(heard.append)

        def fail(group=group, barrier=barrier):
            barrier.wait()
            group.fail(RuntimeError("now"))

        threads = [threading.Thread(target=each) for each in (register, register, fail)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 40


# Shutdown.


@pytest.mark.parametrize("point", ["build", "init_device", "load"])
def test_a_start_that_fails_leaves_nothing_and_can_be_tried_again(launcher, point):
    before = ours()
    with pytest.raises((RemoteError, ValueError)):
        launcher.loaded(**{"plugins.dummy.fail_at": point})
    gc.collect()
    assert ours() <= before
    launcher.loaded().shutdown()


def test_shutdown_of_what_was_never_started_is_safe(launcher):
    executor_class, config, registry, platform = launcher.prepare()
    executor = executor_class(config, registry, platform)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ExecutorFailedError):
        executor.collective_rpc("supported_tasks")


def tell_of_shutdown(worker, folder):
    """Have the worker write down its calls whenever it is shut down."""
    shut_down = worker.shutdown

    def told():
        shut_down()
        with (Path(folder) / f"calls-{worker.rank}").open("a") as file:
            file.write(json.dumps(worker.recorded_calls()) + "\n")

    worker.shutdown = told


def test_the_worker_is_shut_down_once_and_last(launcher, tmp_path, world_size):
    group = launcher.loaded()
    group.collective_rpc(tell_of_shutdown, args=(str(tmp_path),))
    group.shutdown()
    group.shutdown()
    for rank in range(world_size):
        (calls,) = (tmp_path / f"calls-{rank}").read_text().splitlines()
        names = [name for name, _ in json.loads(calls)]
        assert names.count("shutdown") == 1
        assert names[-1] == "shutdown"


def test_shutdown_ends_running_work_and_runs_no_queued_call(launcher, tmp_path, steps):
    group = launcher.ready(**{"plugins.dummy.step_seconds": 600})
    marker = tmp_path / "ran"

    def mark(worker, path):
        from pathlib import Path

        Path(path).touch()

    running = group.execute_model(steps.new(), non_block=True)
    queued = group.collective_rpc(mark, args=(str(marker),), non_block=True)
    group.shutdown()
    error = running.exception(60)
    assert isinstance(error, ExecutorFailedError) or isinstance(error.__cause__, CancelledStepError)
    assert isinstance(queued.exception(60), ExecutorFailedError)
    assert not marker.exists()


def test_shutdown_keeps_its_deadline_though_a_worker_is_stuck(launcher, gate, caplog, world_size):
    group = launcher.loaded()
    held = group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    gate.wait_entered(world_size)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        group.shutdown(timeout=0.05)
    assert isinstance(held.exception(60), ExecutorFailedError)
    gate.open()


def test_a_collected_executor_frees_its_workers(launcher, eventually):
    before = ours()
    executor_class, config, registry, platform = launcher.prepare()
    group = executor_class.start(config, registry, platform)
    future = group.collective_rpc("supported_tasks", non_block=True)
    future.result(60)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    eventually(lambda: ours() <= before)


def test_calls_pending_when_the_executor_is_collected_end(launcher, gate):
    executor_class, config, registry, platform = launcher.prepare()
    group = executor_class.start(config, registry, platform)
    group.collective_rpc(gate.passing, args=gate.args, non_block=True)
    queued = group.collective_rpc("supported_tasks", non_block=True)
    del group
    gc.collect()
    gate.open()
    assert isinstance(queued.exception(60), ExecutorFailedError)


# Exclusive platforms, and two engines in one process.


def test_an_exclusive_platform_serves_one_engine_at_a_time(launcher, world_size):
    if world_size > 1:
        pytest.skip("several workers of one process cannot share an exclusive platform")
    exclusive = {"plugins.dummy.exclusive": True}
    first = launcher.loaded(**exclusive)
    with pytest.raises(UnsupportedError, match="its runtime is exclusive and an engine here"):
        launcher.loaded(**exclusive)
    first.collective_rpc("supported_tasks")
    first.shutdown()
    launcher.loaded(**exclusive).collective_rpc("supported_tasks")


def test_a_failed_start_gives_an_exclusive_platform_back(launcher, world_size):
    if world_size > 1:
        pytest.skip("several workers of one process cannot share an exclusive platform")
    for point in ("build", "init_device"):
        with pytest.raises((RemoteError, ValueError)):
            launcher.loaded(**{"plugins.dummy.exclusive": True, "plugins.dummy.fail_at": point})
    launcher.loaded(**{"plugins.dummy.exclusive": True})


def test_two_engines_in_one_process_share_nothing(launcher, steps):
    one, two = launcher.ready(), launcher.ready(max_loras=1)
    one.execute_model(steps.new("only one"))
    one.sleep(1)
    assert not two.is_sleeping
    assert set(two.collective_rpc("known_requests")) == {()}
    assert two.calls is not one.calls
    one.shutdown()
    assert two.collective_rpc("supported_tasks")


def test_a_call_of_another_generation_is_refused_by_the_worker(group):
    call = Call(call_id=group.calls.next_id(), generation=4, method="supported_tasks")
    gather = group.calls.open(call, group.world_size)
    group.call_workers(call)
    with pytest.raises(RemoteError, match="is of generation 4, this worker is of 0"):
        group._await(gather, None)
