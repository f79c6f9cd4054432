"""The kit catches plugins that are wrong in one way, by the tests that are meant for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SAMPLE = (
    "twin-plugin", "heavy-import", "misspelt-hook",
    "twin-platform", "undeclared", "check-mutates",
    "leaked-memory", "sleep-pretends", "wake-loses-a-buffer",
    "wrong-slot", "stale-table", "adapter-ignored",
    "logprobs-off-by-one", "swallowed-error", "twin-threads",
)  # fmt: skip
"""Twelve mutants and three twins, of every suite."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run_mutants.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)


def examined(*names: str) -> dict[str, dict]:
    done = run("--json", *names)
    assert done.stdout, done.stderr[-4000:]
    return {each["name"]: each for each in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def sample() -> dict[str, dict]:
    return examined(*SAMPLE)


@pytest.fixture(scope="module")
def everything() -> dict[str, dict]:
    return examined()


@pytest.fixture(scope="module")
def listed() -> list[dict]:
    """Every mutant, not run."""
    return json.loads(run("--list").stdout)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_mutant_is_caught_and_a_twin_passes(sample, name):
    found = sample[name]
    assert found["verdict"] == ("passes" if name.startswith("twin") else "caught"), found


@pytest.mark.slow
def test_no_mutant_survives(everything):
    twins = {name for name in everything if name.startswith("twin")}
    assert len(everything) - len(twins) >= 60
    wrong = {
        name: (found["verdict"], found["missing"], found["failed"], found["crashed"])
        for name, found in everything.items()
        if found["verdict"] != ("passes" if name in twins else "caught")
    }
    assert not wrong


def test_there_are_sixty_and_the_tests_that_they_name_are_the_kits(listed):
    assert len({each["name"] for each in listed}) == len(listed)
    mutants = [each for each in listed if each["caught_by"]]
    assert len(mutants) >= 60
    for each in listed:
        for test in each["caught_by"]:
            assert test.partition("[")[0] in each["tests"], f"{each['name']}: there is no {test}"


def test_it_is_said_when_a_mutant_is_not_caught_as_it_is_meant(listed):
    """By another test, or by a mistake of its own."""
    code = (
        "from run_mutants import Finding, table\n"
        "from mutation import Mutation\n"
        "def finding(*failed, meant=('test_a',)):\n"
        "    mutation = Mutation(name='m', wrong='it', caught_by=meant, suite='S', of='')\n"
        "    return Finding(mutation=mutation, failed=dict.fromkeys(failed, said), passed=1)\n"
        "said = 'ContractError: TypeError'\n"
        "for each in (finding('test_a'), finding('test_a[1]'), finding('test_b'), finding(),\n"
        "             finding(meant=()), finding('test_b', meant=())):\n"
        "    print(each.verdict)\n"
        "for said in ('TypeError: x', 'RemoteError: worker rank 0 raised NameError in y'):\n"
        "    print(finding('test_a').verdict)\n"
        "print(table([finding('test_b')]).splitlines()[-1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "caught", "caught", "caught by another", "survived", "passes", "fails",
        "crashed", "crashed",
        "| m | it | `test_a` | caught by another: test_b |",
    ], done.stderr  # fmt: skip
