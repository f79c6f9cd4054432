"""``hardpoint generate`` with the default model on the platform that is chosen for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
QUESTION = "What is the capital of France?"


def test_a_question_is_answered():
    done = subprocess.run(
        [HARDPOINT, "generate", "--json", "--max-tokens", "16", "--max-model-len", "256", QUESTION],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    (result,) = content["results"]
    assert "Paris" in result["text"]
    assert result["prompt"] == QUESTION
    assert result["finish_reason"] == "stop"
    assert result["metrics"]["num_prompt_tokens"] > 20  # the template's words, too
    assert content["platform"] == "cpu"
    assert content["executor"] == "uni"
    assert content["model"].endswith(".gguf")
    chosen = f"hardpoint: {Path(content['model']).name} on platform cpu, executor uni"
    assert chosen in done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1, 1.5, 2, 3, 5, 8])
def test_ctrl_c_at_any_moment_of_start_and_generation(seconds):
    """The moments are spread over imports, loading, warming up and generating: they are seconds of
    the processor's, of which a busy machine gives few.
    """
    process = subprocess.Popen(
        [HARDPOINT, "generate", "--max-tokens", "1000", "--ignore-eos", "Tell a long story."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    program, end = psutil.Process(process.pid), time.monotonic() + 300
    while sum(program.cpu_times()[:2]) < seconds:
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end
        time.sleep(0.01)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    took = time.monotonic() - begun
    print(f"\nafter {seconds} s: back in {took:.2f} s")
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert took < 5  # one second on a machine that is free
