"""The library under AddressSanitizer and UndefinedBehaviorSanitizer: the tests of its kernels and
of packing, and steps of programs on several threads.

Its portable level is built as the mirror of the widest one: the same code over vectors as wide, the
sums of VNNI in plain words. So the logic of that level runs on processors that have not got it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
SANITIZED = ("-DMIRROR", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.slow


def build_script():
    spec = importlib.util.spec_from_file_location("hatch_build", PROJECT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The environment in which Python loads the library, built with sanitizers."""
    script = build_script()
    try:
        compiler = script.compiler()
    except script.CannotBuildError as error:
        pytest.skip(str(error))
    library = tmp_path_factory.mktemp("sanitized") / script.LIBRARY
    script.build(PROJECT / "native", library, (*script.FLAGS, *SANITIZED))
    preloaded = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the first looks for what throws in the second
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "HARDPOINT_NATIVE_TESTED": str(library),
    }


@pytest.mark.parametrize("tests", ["kernels", "packed", "packing"])
def test_the_kernels(sanitized, tests):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         str(TESTS / f"test_native_{tests}.py")],
        env=sanitized, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_program(sanitized):
    done = subprocess.run(
        [sys.executable, str(TESTS / "native_steps.py")],
        env=sanitized, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout == "whole and cut up alike\n"
