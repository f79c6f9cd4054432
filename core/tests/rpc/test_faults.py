"""Fault points: silent unless planned, exact when planned, counted over processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.config.loading import load_config
from hardpoint.rpc import faults as module
from hardpoint.rpc.faults import (
    DUPLICATE,
    EXIT_CODE,
    LOSE,
    POINTS,
    VARIABLE,
    Fault,
    FaultPoints,
    InjectedFaultError,
    fault,
    faults,
    fired,
    parse_faults,
    passed,
)


def test_a_point_passes_without_a_plan():
    points = FaultPoints()
    assert not points.active
    assert points("reply.before_send", 1) == ""
    assert points("no such point") == ""  # nothing is looked up: it costs nothing
    assert not fault.active


def test_a_fault_fires_at_its_passage_on_its_rank_and_is_counted(tmp_path):
    points = FaultPoints(f"{tmp_path}:reply.before_send:2@1")
    assert points.active
    for rank in (0, 0, 0, 1):
        assert points("reply.before_send", rank) == ""
    assert fired(tmp_path, "reply.before_send") == 0
    with pytest.raises(InjectedFaultError, match="passage 2, rank 1") as caught:
        points("reply.before_send", 1)
    assert (caught.value.point, caught.value.nth, caught.value.rank) == ("reply.before_send", 2, 1)
    assert points("reply.before_send", 1) == ""
    assert points("call.before_send") == ""
    assert fired(tmp_path, "reply.before_send") == 1
    assert passed(tmp_path, "reply.before_send") == 3
    assert passed(tmp_path, "call.before_send") == 0


def test_what_becomes_of_a_message(tmp_path):
    points = FaultPoints(f"{tmp_path}:call.before_send=lose, call.before_send:2=duplicate")
    assert [points("call.before_send") for _ in range(3)] == [LOSE, DUPLICATE, ""]
    points = FaultPoints(f"{tmp_path}:worker.received=memory_error")
    with pytest.raises(MemoryError, match="injected"):
        points("worker.received", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reply.befor_send", "no fault point; known: call.after_send"),
        ("heartbeat:x", "not of the form"),
        ("heartbeat=burn", "no kind of fault"),
    ],
)
def test_a_malformed_plan_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_faults(text)


def test_a_planned_process_refuses_an_unknown_point(tmp_path):
    with pytest.raises(ValueError, match="no fault point"):
        FaultPoints(f"{tmp_path}:heartbeat")("heart.beat")


def test_faults_are_read():
    assert parse_faults("heartbeat:3@1=stop , worker.received") == (
        Fault(point="heartbeat", nth=3, rank=1, kind="stop"),
        Fault(point="worker.received"),
    )


CHILD = """
from hardpoint.rpc.faults import fault
for _ in range(3):
    fault("heartbeat", 2)
print("alive", flush=True)
"""


def child(folder, plan):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, VARIABLE: f"{folder}:{plan}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("kind", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE), ("raise", 1)]
)
def test_a_child_process_ends_as_planned(tmp_path, kind, code, capfd):
    with child(tmp_path, f"heartbeat:2@2={kind}") as process:
        assert process.wait(60) == code
    assert passed(tmp_path, "heartbeat") == 2
    assert fired(tmp_path, "heartbeat") == 1
    capfd.readouterr()


def test_a_child_process_stops_and_goes_on(tmp_path):
    with child(tmp_path, "heartbeat:2=stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "alive\n"
    assert passed(tmp_path, "heartbeat") == 3


def test_a_child_process_hangs_and_ignores_sigterm(tmp_path):
    with child(tmp_path, "heartbeat=ignore_term,heartbeat:2=hang") as process:
        while fired(tmp_path, "heartbeat") < 2:
            assert process.poll() is None
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.kill()


def test_a_block_has_faults_and_proves_that_they_fired(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with faults(tmp_path, "call.after_send=lose"):
        assert os.environ[VARIABLE] == f"{tmp_path}:call.after_send=lose"
        assert load_config(environ=os.environ)  # it is no configuration key
        assert fault("call.after_send") == LOSE
    assert not fault.active
    assert VARIABLE not in os.environ
    with (
        pytest.raises(AssertionError, match="no fault fired at heartbeat"),
        faults(tmp_path, "heartbeat"),
    ):
        pass
    with pytest.raises(KeyError), faults(tmp_path, "heartbeat"):
        raise KeyError  # what really went wrong is not hidden


ROOT = Path(__file__).resolve().parents[3]


def test_every_point_is_placed_once_known():
    """A point that nobody passes could never fire; a passed one that is not known would raise."""
    placed = set()
    for path in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        if path != Path(module.__file__):
            placed |= set(re.findall(r"\b_?fault\(\s*\"([\w.]+)\"", path.read_text()))
    assert placed <= POINTS
    assert placed >= POINTS
