"""The command line over workers in processes of their own."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

KEYS = ["--platform", "dummy", "--load-format", "dummy", "--model", "dummy"]
GENERATE = (
    "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))",
    "generate", "--raw", "--executor", "mp", *KEYS,
)  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_generate_ends_with_1_and_names_the_dead_worker(drivers, eventually, signum):
    slowly = ("--set", "plugins.dummy.step_seconds=0.2", "--set", "plugins.dummy.num_workers=2")
    driver = drivers(*GENERATE, *slowly, "--max-tokens", "200", "--ignore-eos", "hi", script="-c")

    def stepping():
        for pid in driver.family():
            if psutil.Process(pid).cmdline()[:1] == ["Worker_1"]:
                return pid if driver.process.stdout.read(1) else None
        return None

    victim = eventually(stepping)
    os.kill(victim, signum)
    code, error = driver.ended()
    assert code == 1
    assert f"Error: worker rank 1 (pid {victim}) ended by signal {int(signum)}" in error
    assert "Traceback (most recent call last):\n  File" not in error
    assert driver.family() == []


def test_generate_answers_as_it_does_in_one_process(drivers):
    answers = []
    for workers in (1, 3):
        many = ("--set", f"plugins.dummy.num_workers={workers}", "--seed", "3")
        driver = drivers(*GENERATE, *many, "--max-tokens", "5", "--json", "hi", script="-c")
        out, error = driver.process.communicate(timeout=60)
        assert driver.process.returncode == 0, error
        answers.append(json.loads(out)["results"][0]["token_ids"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5
