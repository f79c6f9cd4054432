"""Who has a turn in `hardpoint bench cpu`, and what is left of it when it ends early."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from hardpoint_engine.bench import cpu, cpu_table, driver

CLOCK = """
import itertools, time
ticks = itertools.count()
class Engine:
    vocab_size = 2000
    def __init__(self, **options):
        slow = 10.0 if options.get("eager") else 1.0
        time.perf_counter = lambda: next(ticks) * slow
    def run(self, prompts, new):
        return len(prompts) * new
    def figures(self):
        return {"ran_s": 2.0, "step_s": 1.6, "weight_bytes": 1e6, "peak_bytes": 2e6}
    def close(self):
        pass
"""
STUCK = """
import os, time
class Engine:
    vocab_size = 2000
    def __init__(self, **options):
        self.turns = 0
    def run(self, prompts, new):
        if self.turns == {turns}:
            with open({told!r}, "w") as file:
                file.write(f"{{os.getpid()}}\\n")
            while True:
                time.sleep(0.05)
        self.turns += 1
        return len(prompts) * new
    def figures(self):
        return {{"ran_s": 2.0, "step_s": 1.6, "weight_bytes": 1e6, "peak_bytes": 2e6}}
    def close(self):
        pass
"""
COMMAND = """
import sys
from hardpoint_engine.bench import cpu
from hardpoint_engine.cli import bench_cpu
from hardpoint_engine.cli.interruption import interruptible
class Files:
    def __init__(self, source, folder, tell):
        (folder / "made").touch()
    def safetensors(self):
        return "model"
bench_cpu.ModelFiles, bench_cpu.IN_THIS = Files, ()
cpu.ENGINES = {cpu.OURS: sys.argv[1]}
with interruptible():
    bench_cpu.run(
        model="model.gguf", folder=None, formats="fp32,bf16", cases="B1", repeats=5, threads=1,
        minutes=None, peers=(), compiled=True, as_json=True, plot_path=None,
    )
"""
SPINNING = """
import threading, time
class Engine:
    vocab_size = 2000
    def __init__(self, spin):
        self.spin = spin
    def run(self, prompts, new):
        if self.spin:
            threading.Thread(target=self._forever, daemon=True).start()
        return len(prompts) * new
    def _forever(self):
        while True:
            pass
    def figures(self):
        return {}
    def close(self):
        pass
"""
PATIENCE = 60.0


class Files:
    """Stands for the model's files."""

    def gguf(self, kind):
        return f"/model.{kind}.gguf"

    def safetensors(self):
        return "/model"


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Returns what measures in one case engines that are as fast as CLOCK says."""
    path = tmp_path / "clock.py"
    path.write_text(CLOCK)
    monkeypatch.setattr(cpu, "ENGINES", dict.fromkeys(cpu.ENGINES, str(path)))
    monkeypatch.setattr(cpu, "read_bandwidth", lambda threads: 1e10)

    def run(formats, **peers):
        named = dict.fromkeys(peers, sys.executable)
        plan = cpu.CpuPlan(formats=formats, cases=("B1",), repeats=3, peers=named)
        said = []
        return cpu.measure(plan, Files(), said.append), said

    return run


def test_the_hopeless_way_of_an_engine_has_one_turn_that_counts(race, monkeypatch):
    turns = []
    whole = driver.Driver.tell

    def tell(self, order, **how):
        turns.append((self.name, order))
        return whole(self, order, **how)

    monkeypatch.setattr(driver.Driver, "tell", tell)
    found, said = race(("fp32",), vllm=True)
    assert turns.count(("vllm fp32 compiled", "turn")) == 1 + 3
    assert turns.count(("vllm fp32 eager", "turn")) == 1 + 1
    (once,) = found["once"]
    assert (once["name"], once["case"]) == ("vllm fp32 eager", "B1")
    assert any("vllm fp32 eager took more than 5 times" in line for line in said)
    assert f"one turn only: vllm fp32 eager, B1: {once['why']}" in cpu_table.table(found)


def test_whoever_is_compared_within_a_format_has_all_turns():
    def rivals(engine, kind):
        return cpu.Runner(engine=engine, format=kind, arguments="{}").rivals

    assert rivals("vllm", "fp32") == rivals("vllm", "bf16") != rivals("transformers", "bf16")
    assert rivals("llama.cpp", "Q4_0") != rivals("llama.cpp", "Q8_0")
    assert rivals("hardpoint", "fp32") != rivals("hardpoint", "w8a8")


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def interrupted(tmp_path, turns, number):
    """Run the command in a temporary folder of its own, have a signal reach it in the turn after
    so many of an engine, and give the process, its output, and whether that engine is gone.
    """
    own, told, script = tmp_path / "own", tmp_path / "told", tmp_path / "engine.py"
    own.mkdir()
    script.write_text(STUCK.format(turns=turns, told=str(told)))
    command = [sys.executable, "-c", COMMAND, str(script)]
    environ = {**os.environ, "TMPDIR": str(own)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        try:
            engine = int(until(lambda: told.exists() and told.read_text().rstrip("\n")))
            descriptor = os.pidfd_open(engine)
            try:
                (folder,) = own.iterdir()
                assert folder.name.startswith("hardpoint-bench-")
                process.send_signal(number)
                output, _ = process.communicate(timeout=PATIENCE)
                until(lambda: select.select([descriptor], [], [], 0)[0])
                assert list(own.iterdir()) == []
                yield process, output
            finally:
                os.close(descriptor)
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an engine ends with its turn")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_turns_that_there_were(tmp_path, number):
    with interrupted(tmp_path, 2, number) as (process, output):
        assert process.returncode == 128 + number
        found = json.loads(output)
        assert (found["cut"], found["turns"]) == (number.name, 1)
        assert {row["format"] for row in found["rows"]} == {"fp32", "bf16", "bf16-bfloat16"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an engine ends with its turn")
def test_a_signal_before_any_turn_that_counts_prints_nothing(tmp_path):
    with interrupted(tmp_path, 0, signal.SIGTERM) as (process, output):
        assert (process.returncode, output) == (128 + signal.SIGTERM, b"")


@pytest.mark.parametrize("spin", [True, False])
def test_the_processes_of_an_engine_are_watched_until_they_rest(tmp_path, monkeypatch, spin):
    script = tmp_path / "spinning.py"
    script.write_text(SPINNING)
    monkeypatch.setattr(driver, "QUIET_WINDOW", 3.0 if spin else driver.QUIET_WINDOW)
    monkeypatch.setattr(driver, "MOST_UNQUIET", 0.1 if spin else PATIENCE)
    turns = str(driver.HERE / "serving_turns.py")
    options = json.dumps({"spin": spin})
    engine = driver.Driver("stub", script=(turns, str(script), options))
    try:
        engine.opened()
        engine.tell("turn", batch=1, length=2, new=1, seed=0)
        assert engine.settle() is not spin
    finally:
        engine.kill()
        engine.close()
