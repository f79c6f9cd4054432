"""The fault matrix: each fault, in each phase, of each process, on real processes.

Each cell ends in its named outcome within its bound, leaves nothing (fixture ``marked``, looked at
from outside), and a second group starts at once. ``python tests/faults/table.py`` prints it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import contextmanager

import psutil
import pytest
from fault_cells import (
    BEAT,
    CELLS,
    DIED,
    GONE,
    HANG_AFTER,
    HUNG,
    LOGGED,
    NOTHING,
    RAISED,
    SILENT,
    SILENT_AFTER,
    SLOW_START,
    START_TIMEOUT,
)
from fault_groups import SIZE, SLACK, exit_soon, ignore_term, pid_of, settle, step
from hardpoint import errors
from hardpoint.errors import ExecutorFailedError
from hardpoint.messages import SchedulerOutput
from hardpoint.rpc.faults import EXIT_CODE, fired

WORKERS = [cell for cell in CELLS if cell.outcome and cell.target != "driver"]
DRIVERS = [cell for cell in CELLS if cell.outcome and cell.target == "driver"]
DUMMY_KINDS = {"out_of_memory": "memory_error"}


def named(cells):
    return pytest.mark.parametrize("cell", cells, ids=lambda cell: cell.name)


def test_every_cell_has_an_outcome_or_a_reason():
    assert len(CELLS) == 7 * 6 * 3
    for cell in CELLS:
        assert bool(cell.outcome) != bool(cell.reason)
        assert cell.outcome or len(cell.reason) > 40, "a reason is a sentence"
    assert len(WORKERS) == 2 * 7 * 6


# Workers.


class Victim:
    """One worker that is to fail, and the group that it is in."""

    def __init__(self, cell, groups, log):
        self.cell = cell
        self.groups = groups
        self.log = str(log)
        self.rank = 0 if cell.target == "rank 0" else SIZE - 1
        self.pid = None
        self.point = {"start": "build", "load": "load", "step": "step", "between": "sample"}.get(
            cell.phase
        )
        outer = cell.phase == "between" and cell.kind in ("kill", "stop", "exit")
        self.by_plan = self.point is not None and not outer
        """Whether the fake device itself fails; else something is done to the worker later."""
        self.executor = None
        self.took = 0.0
        """Seconds from the fault, or from the call in which it comes, to its outcome."""

    def settings(self):
        """What the group is configured with: only what this cell needs is short."""
        keys = {
            "plugins.dummy.fault_log": self.log,
            "plugins.dummy.silent_after": SILENT_AFTER if self.cell.outcome == SILENT else 20.0,
            "plugins.mp.start_timeout": START_TIMEOUT if self.cell.outcome == SLOW_START else 60.0,
        }
        if self.cell.outcome == HUNG:
            keys["plugins.mp.hang_after"] = HANG_AFTER
        if self.by_plan:
            kind = DUMMY_KINDS.get(self.cell.kind, self.cell.kind)
            keys["plugins.dummy.fail_at"] = f"{self.point}@{self.rank}={kind}"
        return keys

    def strike(self):
        """Do it now, to a worker that is idle."""
        kind = self.cell.kind
        if kind in ("kill", "stop"):
            os.kill(self.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        elif kind == "exit":
            self.executor.collective_rpc(exit_soon, args=(self.rank, EXIT_CODE))
        elif kind == "ignore_term":
            self.executor.collective_rpc(ignore_term, args=(self.rank,))
        else:
            self.plan("heartbeat", kind)

    def plan(self, point, kind):
        kind = DUMMY_KINDS.get(kind, kind)
        texts = [f"{point}@{self.rank}={kind}"]
        if kind == "ignore_term":
            texts.append(f"{point}@{self.rank}=hang")
        self.point = point
        self.executor.collective_rpc(plan_in_worker, args=(f"{self.log}:{','.join(texts)}",))

    def assert_fired(self):
        if self.by_plan or self.point == "heartbeat":
            assert fired(self.log, self.point) == 1, "the fault did not fire: nothing was shown"


def plan_in_worker(worker, text):
    from hardpoint.rpc import faults  # the worker's own: this function travels by value

    faults.fault.plan(text)


@contextmanager
def ending(cell, victim):
    """Expect the block to end as the cell says, within its bound; keep the error in the yielded
    list.
    """
    kept = []
    began = time.monotonic()
    try:
        yield kept
    except Exception as error:
        kept.append(error)
    took = victim.took = time.monotonic() - began
    assert kept, f"nothing was raised; expected {cell.outcome}"
    assert took < cell.bound + SLACK, f"it took {took:.1f} s"
    judge(cell, victim, kept[0])


def judge(cell, victim, error):
    kind = getattr(errors, cell.outcome)
    assert type(error) is kind, repr(error)
    if cell.outcome == SLOW_START:
        assert victim.rank in error.stages
        return
    assert error.rank == victim.rank
    if victim.pid is not None and cell.outcome != RAISED:
        assert error.pid == victim.pid
    if cell.outcome == DIED:
        assert error.exit == {"kill": -signal.SIGKILL, "exit": EXIT_CODE}[cell.kind]
    if cell.outcome in (SILENT, HUNG) and cell.kind != "raise":
        assert 'File "' in error.stack, "its Python stack is told"
    if cell.outcome == RAISED:
        wanted = {"raise": "DummyFault", "out_of_memory": "MemoryError"}[cell.kind]
        assert type(error.__cause__).__name__ == wanted
        assert "Traceback" in error.remote_traceback


@named(WORKERS)
def test_a_worker_that_fails(cell, groups, outside, marked, tmp_path, caplog, record_property):
    log = tmp_path / "fired"
    log.mkdir()
    victim = Victim(cell, groups, log)
    with caplog.at_level(logging.WARNING, logger="hardpoint"):
        {
            "start": while_starting,
            "load": while_loading,
            "idle": while_idle,
            "step": in_a_step,
            "between": between_phases,
            "shutdown": while_shutting_down,
        }[cell.phase](cell, victim)
        victim.assert_fired()
        end_of(cell, victim, outside, marked, caplog)
    record_property("seconds", victim.took)
    second(groups)


def while_starting(cell, victim):
    executor = victim.executor = victim.groups.built(**victim.settings())
    with ending(cell, victim):
        executor.start_workers()


def while_loading(cell, victim):
    executor = victim.executor = victim.groups.built(**victim.settings())
    executor.start_workers()
    victim.pid = executor.collective_rpc(pid_of)[victim.rank]
    executor.collective_rpc("init_device")
    with ending(cell, victim):
        executor.collective_rpc("load_model")


def ready(victim):
    executor = victim.executor = victim.groups.ready(**victim.settings())
    victim.pid = executor.collective_rpc(pid_of)[victim.rank]
    return executor


def while_idle(cell, victim):
    executor = ready(victim)
    if cell.outcome == NOTHING:
        victim.strike()
        assert step(executor).step_id == 1
        assert executor.failure is None
        return
    with ending(cell, victim):
        victim.strike()
        settle(lambda: executor.failure is not None)
        raise executor.failure
    with pytest.raises(ExecutorFailedError):
        executor.check_health()


def in_a_step(cell, victim):
    executor = ready(victim)
    with ending(cell, victim):
        step(executor, 1)
    if cell.outcome == RAISED:
        assert step(executor, 2).step_id == 2
        assert len(executor.check_health()) == SIZE


def between_phases(cell, victim):
    executor = ready(victim)
    ticket = executor.execute_model(SchedulerOutput(step_id=1, defer_sampling=True))
    with ending(cell, victim) as kept:
        if not victim.by_plan:
            victim.strike()
            settle(lambda: executor.failure is not None)
        try:
            executor.sample_tokens(ticket)
        except ExecutorFailedError as error:
            raise error.__cause__ or error from None  # the group had failed before
    if cell.outcome == RAISED:
        assert step(executor, 2).step_id == 2
    else:
        assert executor.failure is kept[0]


def while_shutting_down(cell, victim):
    ready(victim)
    victim.plan("shutdown.worker", cell.kind)


def end_of(cell, victim, outside, marked, caplog):
    """Shut down: in time, and then nothing is there."""
    executor = victim.executor
    if cell.outcome in (DIED, SILENT, HUNG):
        assert executor.failure is not None
        with pytest.raises(ExecutorFailedError):
            executor.collective_rpc("supported_tasks")
    if cell.outcome == RAISED:
        assert executor.failure is None
    span = 2.0
    began = time.monotonic()
    executor.shutdown(span)
    took = time.monotonic() - began
    assert took < span + SLACK
    assert outside.look(marked)["processes"] == {}
    if cell.phase == "shutdown":
        victim.took = took
        assert fired(victim.log, "shutdown.worker") > 0
    if cell.outcome == LOGGED:
        assert f"worker rank {victim.rank} (pid {victim.pid})" in caplog.text
    if cell.phase == "idle" and cell.outcome == NOTHING:
        assert caplog.text == ""


def second(groups):
    """Another group starts at once, and works."""
    began = time.monotonic()
    another = groups.ready()
    assert step(another).step_id == 1
    assert time.monotonic() - began < 2.0 + SLACK
    another.shutdown()


# The driver.


def held(phase):
    """Return keys by which a driver is long in a phase."""
    return {
        "start": ("plugins.dummy.fail_at=build=hang",),
        "load": ("plugins.dummy.load_seconds=60",),
        "step": ("plugins.dummy.step_seconds=1.0",),
    }.get(phase, ())


def bring_to(driver, drivers, cell, log):
    """Have the driver be in the phase of the cell."""
    driver.until("starting")
    if cell.phase in ("start", "load"):
        settle(lambda: len(drivers.family()) == SIZE + 2)
        if cell.phase == "start" and cell.kind != "stop":
            settle(lambda: fired(log, "build") == SIZE)
        return
    driver.until("idle")
    if cell.phase == "idle":
        return
    if cell.phase == "shutdown":
        hang = "stop" if cell.kind == "stop" else "hang"
        point = "here" if cell.kind == "stop" else "there"
        name = "shutdown.driver" if cell.kind == "stop" else "shutdown.worker"
        driver.go(f"{point} {log}:{name}={hang}")
    driver.go()
    driver.until("stepping")
    if cell.phase == "step":
        return
    driver.until("between")
    if cell.phase == "between":
        return
    driver.go()
    driver.until("closing")
    settle(lambda: fired(log, name) > 0)


@named(DRIVERS)
def test_a_driver_that_fails(cell, drivers, marked, tmp_path, record_property):
    log = tmp_path / "fired"
    log.mkdir()
    keys = held(cell.phase) if cell.kind != "stop" or cell.phase == "step" else ()
    keys += (
        ("plugins.dummy.load_seconds=1.5",) if (cell.kind, cell.phase) == ("stop", "load") else ()
    )
    silent = SILENT_AFTER if cell.kind == "stop" else 20.0
    driver = drivers.start(
        *keys, f"plugins.dummy.fault_log={log}", f"plugins.dummy.silent_after={silent}"
    )
    bring_to(driver, drivers, cell, log)
    began = time.monotonic()
    if cell.outcome == GONE:
        is_gone(driver, drivers, cell)
        record_property("seconds", time.monotonic() - began)
        again = drivers.start()
        live_on(again)
    elif cell.outcome == NOTHING:
        is_unharmed(driver, cell)
        record_property("seconds", time.monotonic() - began)
    else:
        raises(driver, drivers, cell)
        record_property("seconds", time.monotonic() - began)


def is_gone(driver, drivers, cell):
    if cell.kind == "kill":
        driver.signal(signal.SIGKILL)
    else:
        driver.go("exit")
    code, _ = driver.ended()
    assert code == {"kill": -signal.SIGKILL, "exit": 3}[cell.kind]
    took = settle(lambda: not drivers.family())
    assert took < cell.bound + SLACK


def is_unharmed(driver, cell):
    """Stop the driver for longer than its workers may be silent; it goes on as if nothing were."""
    if cell.phase != "shutdown":  # there it stopped itself
        driver.signal(signal.SIGSTOP)
    process = psutil.Process(driver.process.pid)
    settle(lambda: process.status() == psutil.STATUS_STOPPED)
    time.sleep(SILENT_AFTER + 10 * BEAT)  # the fault itself
    driver.signal(signal.SIGCONT)
    live_on(driver, cell.phase)


def live_on(driver, phase="start"):
    """See the driver through the rest of its life, and a second one, without a failure."""
    words = ["idle", "stepping", "stepped", "between", "sampled", "closing", "closed", "free"]
    first = {"start": 0, "load": 0, "idle": 1, "step": 2, "between": 4, "shutdown": 6}[phase]
    if phase in ("idle", "between"):
        driver.go()
    for word in words[first:]:
        said, what = driver.word()
        while said == "starting":
            said, what = driver.word()
        assert (said, said == "raised" and what) == (word, False)
        if word in ("idle", "between"):
            driver.go()
        if word == "closing":
            assert what is None, "no failure"
    driver.go()
    driver.until("again")
    assert driver.ended() == (0, "")


def raises(driver, drivers, cell):
    """Raise in the driver's main thread: its caller sees that, and the group goes on."""
    kind = {"raise": signal.SIGUSR1, "out_of_memory": signal.SIGUSR2}[cell.kind]
    time.sleep(0.1)  # to be well inside, no synchronisation: it must not matter where it comes
    driver.signal(kind)
    where, name, _ = driver.until("raised")
    assert name == {"raise": "ValueError", "out_of_memory": "MemoryError"}[cell.kind]
    assert where == ("start" if cell.phase == "load" else cell.phase)
    if cell.phase == "step":
        driver.until("stepped")
        driver.until("between")
        driver.go()
    if cell.phase == "between":
        assert driver.until("sampled") == 2
    if cell.phase in ("step", "between"):
        assert driver.until("closing") is None
    driver.until("free")
    settle(lambda: list(drivers.family()) == [driver.process.pid])
    driver.go()
    assert driver.until("again") == 1
    code, text = driver.ended()
    assert code == 0, text
