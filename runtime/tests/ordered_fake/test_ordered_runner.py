"""The whole runner suite, with what accelerators share, on a device that enforces the order of
work, and proof that it would find out: each wrong order, put into a copy of the code, fails.

The device is the process's, so that each run is a pytest of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hardpoint_runtime.staged_copies
import pytest

HERE = Path(__file__).resolve().parent
RUNNER = HERE.parent / "runner"
FILES = sorted(path.name for path in RUNNER.glob("test_*.py"))
COPIES = Path(hardpoint_runtime.staged_copies.__file__)


def run_ordered(*arguments, code=0):
    """Run pytest with the device; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ordered_plugin", "-p", "no:cacheprovider",
         "--tb=short", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_the_device_finds_out_what_is_wrong_and_lets_pass_what_is_right():
    told = run_ordered(HERE / "check_order.py")
    assert re.search(r"^3\d passed", told, re.MULTILINE), told


def test_graphs_figures_and_sleep_on_the_device():
    told = run_ordered(HERE / "check_accelerators.py", RUNNER / "check_accelerator_budget.py")
    assert re.search(r"^3\d passed", told, re.MULTILINE), told


LONG = {"test_runner_architectures.py"}
"""Files that take minutes on this device; another model is little news to it."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in FILES],
)
def test_the_runner_suite(name):
    told = run_ordered(RUNNER / name)
    assert " passed" in told
    assert "skipped" not in told


REUSED = """\
        staged = self.__dict__.setdefault(
            (host.shape, dtype), self.device.host_buffer(host.shape, dtype)
        )
"""
MUTATIONS = {
    "the host does not wait for the event": (
        "            self._event.synchronize()\n",
        "",
        "did not wait for the event that guards it",
    ),
    "the copy does not wait for compute": (
        "        self.stream.wait_stream(self.device.current_stream())\n",
        "",
        "a copy to the host on stream 1 reads what aten::",
    ),
    "the event is recorded on the wrong stream": (
        "            event.record()\n",
        "        event.record()\n",
        "did not wait for the event that guards it",
    ),
    "the event is recorded before the copy": (
        "            values.copy_(tensor, non_blocking=True)\n            event.record()\n",
        "            event.record()\n            values.copy_(tensor, non_blocking=True)\n",
        "did not wait for the event that guards it",
    ),
    "page-locked memory is used again too soon": (
        "        staged = self.device.host_buffer(host.shape, dtype)\n",
        REUSED,
        "page-locked memory that a copy on default stream may still read",
    ),
    "values go to memory that is not page-locked": (
        "        values = self.device.host_buffer(tensor.shape, tensor.dtype)\n",
        "        values = torch.empty(tensor.shape, dtype=tensor.dtype)\n",
        "not page-locked does not block: nothing guards it",
    ),
}


@pytest.mark.parametrize(("before", "after", "words"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_order_is_found_by_the_runner_suite(tmp_path, before, after, words):
    text = COPIES.read_text()
    assert text.count(before) == 1
    mutated = tmp_path / "staged_copies.py"
    mutated.write_text(text.replace(before, after))
    told = run_ordered(
        RUNNER / "test_runner_steps.py",
        "-k", "test_sampling_can_wait",
        "--staged-copies", mutated,
        code=1,
    )  # fmt: skip
    assert words in told, told


def test_memory_that_is_given_back_too_soon_is_found(tmp_path):
    """The runner waits at once and so holds what it fetches; the port's own check does not."""
    before, after = "return Fetch(values, event, tensor)", "return Fetch(values, event)"
    text = COPIES.read_text()
    assert text.count(before) == 1
    mutated = tmp_path / "staged_copies.py"
    mutated.write_text(text.replace(before, after))
    told = run_ordered(HERE / "check_order.py", "--staged-copies", mutated, code=1)
    assert "given back before the copy was done" in told
    assert "test_what_is_on_its_way_is_held" in told
