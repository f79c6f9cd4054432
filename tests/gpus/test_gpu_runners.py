"""The suites of the toolkit's runner with the classes of each platform of GPUs, on the device that
enforces the order of work.

The device is the process's, so that each run is a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "runtime/tests/ordered_fake"
SUITES = ROOT / "runtime/tests/runner"
FILES = sorted(path.name for path in SUITES.glob("test_*.py"))
QUICK = {("cuda", "test_runner_steps.py")}


def run_ordered(name, *files):
    """Run the files with the classes of platform ``name``; return what pytest said."""
    kind = name.capitalize()
    classes = {
        "--device-class": f"hardpoint_{name}.device:{kind}DeviceOps",
        "--worker-class": f"hardpoint_{name}.worker:{kind}Worker",
        "--runner-class": f"hardpoint_{name}.model_runner:{kind}ModelRunner",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ordered_plugin", "-p", "no:cacheprovider",
         "--tb=short", *(word for pair in classes.items() for word in pair), *map(str, files)],
        env={**os.environ, "PYTHONPATH": str(FAKE), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


CASES = [
    pytest.param(name, file, marks=() if (name, file) in QUICK else pytest.mark.slow)
    for name in ("cuda", "rocm", "xpu")
    for file in FILES
]


@pytest.mark.parametrize(("name", "file"), CASES)
def test_the_runner_suite(name, file):
    told = run_ordered(name, SUITES / file)
    assert " passed" in told
    assert "skipped" not in told
