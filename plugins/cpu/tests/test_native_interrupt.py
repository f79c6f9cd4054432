"""Ctrl-C within one long call of a native program, as a terminal sends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hardpoint_cpu.native.library import availability
from hardpoint_cpu.native.program import PATIENCE

available = availability()

PROGRAM = """
import sys, time
from hardpoint_cpu.native import program
from hardpoint_cpu.native.program import Program
from hardpoint_engine import LLM, SamplingParams

program.PATIENCE = float(sys.argv[1])
program.LONG = max(program.LONG, program.PATIENCE)
run = Program.run

def telling(self, inputs, carried=None):
    if len(inputs.token_ids) == 6000:
        print("inside", flush=True)
    return run(self, inputs, carried)

Program.run = telling
keys = {"max_model_len": 8000, "max_num_batched_tokens": 8000, "num_kv_blocks": 520}
try:
    with LLM(
        platform="cpu", executor="uni", plugins={"cpu": {"native": "on", "threads": 1}}, **keys
    ) as llm:
        llm.generate([[5] * 6000], SamplingParams(max_tokens=1))
except KeyboardInterrupt:
    print(time.process_time(), flush=True)
"""


def computed(pid: int) -> float:
    """Seconds for which all threads of a process have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interrupted(patience: float) -> float:
    """Interrupt a prefill whose calls take ``patience`` seconds; return for how many seconds the
    process computed from then on until its engine was closed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(patience)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "inside\n"
        inside = computed(process.pid)
        while computed(process.pid) < inside + 1:  # well within the prefill, which takes far longer
            time.sleep(0.05)
        before = computed(process.pid)
        process.send_signal(signal.SIGINT)
        after, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    return float(after) - before


@pytest.mark.slow
@pytest.mark.skipif(not available.levels, reason=available.reason)
def test_a_long_prefill_is_left_within_a_second():
    """Of computing, which is what a busy machine does not stretch: the engine is closed by then."""
    assert interrupted(PATIENCE) < 1


@pytest.mark.slow
@pytest.mark.skipif(not available.levels, reason=available.reason)
def test_a_call_that_cannot_be_left_does_no_harm_at_the_exit():
    """It still computes when the interpreter ends."""
    assert interrupted(1e9) > 1
