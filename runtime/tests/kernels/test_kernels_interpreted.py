"""The Triton kernels under Triton's interpreter, each run of it a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKS = {
    "each beside its torch operation": HERE / "check_kernels.py",
    "in a runner": HERE.parent / "runner" / "check_kernels.py",
}


def run_interpreted(*arguments):
    """Run pytest where Triton interprets; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
         *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("path", CHECKS.values(), ids=CHECKS)
def test_interpreted(path):
    code, told = run_interpreted(path)
    assert code == 0, told[-6000:]
    assert re.search(r"^\d+ passed", told, re.MULTILINE), told
    assert "skipped" not in told
