"""Twelve cells of the fault matrix on the cpu platform: torch, a real model over two workers, and
ranks that wait for each other in the middle of a step.

The group that each cell starts after its failure, at once, is the one that the next cell breaks.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from attrs import frozen
from fault_groups import SLACK, settle
from hardpoint.errors import (
    ExecutorFailedError,
    RemoteError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint.rpc.faults import EXIT_CODE, faults, fired
from hardpoint_cpu.platform import CpuPlatform

HERE = Path(__file__).parent
HANG_AFTER = 4.0
SILENT_AFTER = 2.5
START_SECONDS = 40.0
"""A bound for a start with torch, on a machine that does other things."""


def _small_engine():
    path = HERE.parent / "parallel" / "small_engine.py"
    spec = importlib.util.spec_from_file_location("fault_small_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small = _small_engine()


@frozen(kw_only=True)
class Cell:
    kind: str
    phase: str
    rank: int
    outcome: type
    pipeline: bool = False

    @property
    def name(self):
        return f"{self.kind}-{self.phase}-rank_{self.rank}-{'pp' if self.pipeline else 'tp'}"


CELLS = [
    Cell(kind="kill", phase="start", rank=0, outcome=WorkerDiedError),
    Cell(kind="kill", phase="load", rank=1, outcome=WorkerDiedError),
    Cell(kind="kill", phase="idle", rank=0, outcome=WorkerDiedError),
    Cell(kind="kill", phase="step", rank=1, outcome=WorkerDiedError),
    Cell(kind="stop", phase="step", rank=1, outcome=WorkerSilentError),
    Cell(kind="raise", phase="step", rank=1, outcome=RemoteError),
    Cell(kind="hang", phase="step", rank=0, outcome=WorkerHungError),
    Cell(kind="ignore_term", phase="step", rank=1, outcome=WorkerHungError),
    Cell(kind="out_of_memory", phase="step", rank=0, outcome=RemoteError),
    Cell(kind="kill", phase="step", rank=0, outcome=WorkerDiedError, pipeline=True),
    Cell(kind="raise", phase="step", rank=0, outcome=RemoteError, pipeline=True),
    Cell(kind="exit", phase="step", rank=1, outcome=WorkerDiedError, pipeline=True),
]


def start(pipeline=False):
    sizes = {"pipeline_parallel_size": 2} if pipeline else {"tensor_parallel_size": 2}
    return small.start(
        executor="mp", **sizes, **{"rpc.heartbeat": 0.05, "plugins.mp.hang_after": HANG_AFTER}
    )


def pid_of(worker):
    return os.getpid()


def fail_next_step(worker, rank, kind, folder):
    """Have the next step of ``rank`` end in the named way, before it comes to the others."""
    import signal
    import time

    from hardpoint.rpc import faults

    if worker.rank != rank:
        return

    def execute_model(scheduler_output):
        del worker.execute_model
        faults.append(folder, "fired-step")
        if kind in ("hang", "ignore_term"):
            if kind == "ignore_term":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        if kind != "raise":
            faults.strike("memory_error" if kind == "out_of_memory" else kind)
        raise ValueError("injected into a step", rank)

    worker.execute_model = execute_model


class Spare:
    """The group that stands ready, of one shape at a time."""

    def __init__(self):
        self.llm = None
        self.pipeline = None

    def take(self, pipeline):
        llm, self.llm = self.llm, None
        if llm is not None and self.pipeline != pipeline:
            llm.shutdown()
            llm = None
        return llm or start(pipeline)

    def replace(self, pipeline):
        """Start a group at once, and see that it works."""
        began = time.monotonic()
        self.llm, self.pipeline = start(pipeline), pipeline
        assert time.monotonic() - began < START_SECONDS
        assert generate(self.llm)


@pytest.fixture(scope="module")
def spare():
    before, CpuPlatform.silent_after = CpuPlatform.silent_after, SILENT_AFTER
    made = Spare()
    yield made
    if made.llm is not None:
        made.llm.shutdown()
    CpuPlatform.silent_after = before


def generate(llm):
    [result] = llm.generate([small.PROMPTS[1]], small.sampling()[0])
    return list(result.outputs[0].token_ids)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_worker_that_fails_on_the_cpu(cell, spare, tmp_path):
    if cell.phase in ("start", "load"):
        error = while_starting(cell, tmp_path)
        pids = []
    else:
        llm = spare.take(cell.pipeline)
        pids = llm.collective_rpc(pid_of)
        began = time.monotonic()
        error = in_the_middle(cell, llm, pids, tmp_path)
        took = time.monotonic() - began
        waits = {WorkerSilentError: SILENT_AFTER + 0.5, WorkerHungError: HANG_AFTER + 1.0}
        assert took < waits.get(cell.outcome, 2.0) + SLACK
        began = time.monotonic()
        llm.shutdown()
        assert time.monotonic() - began < 10.0 + SLACK
    judge(cell, error, pids)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    spare.replace(cell.pipeline)


def while_starting(cell, tmp_path):
    point = {"start": "worker.before_ready", "load": "worker.received:2"}[cell.phase]
    with (
        faults(tmp_path, f"{point}@{cell.rank}={cell.kind}"),
        pytest.raises(cell.outcome) as caught,
    ):
        start(cell.pipeline)
    return caught.value


def in_the_middle(cell, llm, pids, tmp_path):
    """Break the group; return the error that its user sees."""
    if cell.phase == "idle":
        os.kill(pids[cell.rank], signal.SIGKILL)
        settle(lambda: llm.executor.failure is not None)
        return llm.executor.failure
    llm.collective_rpc(fail_next_step, args=(cell.rank, cell.kind, str(tmp_path)))
    try:
        generate(llm)
    except Exception as error:
        assert fired(tmp_path, "step") == 1
        return error
    raise AssertionError("nothing was raised")


def judge(cell, error, pids):
    while type(error) is ExecutorFailedError and error.__cause__ is not None:
        error = error.__cause__
    assert type(error) is cell.outcome, repr(error)
    assert error.rank == cell.rank
    if pids and cell.outcome is not RemoteError:
        assert error.pid == pids[cell.rank]
    if cell.outcome is WorkerDiedError:
        assert error.exit == {"kill": -signal.SIGKILL, "exit": EXIT_CODE}[cell.kind]
    if cell.outcome is RemoteError:
        wanted = {"raise": ValueError, "out_of_memory": MemoryError}[cell.kind]
        assert type(error.__cause__) is wanted, "the first cause, not what followed from it"
    if cell.outcome in (WorkerSilentError, WorkerHungError):
        assert 'File "' in error.stack


DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("small", sys.argv[1])
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)
llm = small.start(executor="mp", tensor_parallel_size=2)
print('["ready", null]', flush=True)
from hardpoint_engine import SamplingParams
while True:
    llm.generate(small.PROMPTS[:2], SamplingParams(max_tokens=30, ignore_eos=True))
"""


def test_a_driver_killed_in_a_step_on_the_cpu(drivers):
    driver = drivers.run([sys.executable, "-c", DRIVER, small.__file__])
    driver.until("ready")
    time.sleep(0.2)  # to be well inside of steps
    assert len(drivers.family()) == 4
    driver.signal(signal.SIGKILL)
    assert settle(lambda: not drivers.family()) < 5.0
