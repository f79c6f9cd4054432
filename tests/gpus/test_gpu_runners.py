"""The suites of the toolkit's runner with the classes of each platform of GPUs, on the device that
enforces the order of work, and on host memory that stands for a GPU.

The device is the process's, so that each run is a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.references import resolve

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "runtime/tests/ordered_fake"
SUITES = ROOT / "runtime/tests/runner"
FILES = sorted(path.name for path in SUITES.glob("test_*.py"))
NAMES = ("cuda", "rocm", "xpu")
QUICK = {("cuda", "test_runner_steps.py")}
SUBSTITUTES = {
    "cuda": "hardpoint_runtime.accelerator.substitute:SubstituteDeviceOps",
    "rocm": "hardpoint_runtime.accelerator.substitute:SubstituteDeviceOps",
    "xpu": "hardpoint_xpu.device:XpuSubstituteOps",
}
DEFAULTS = {"cuda": "full_and_piecewise", "rocm": "full_and_piecewise", "xpu": "none"}


def port_of(name):
    return f"hardpoint_{name}.device:{name.capitalize()}DeviceOps"


def run(name, plugin, device, *files):
    """Run the files with the classes of platform ``name``; return what pytest said."""
    kind = name.capitalize()
    classes = {
        "--platform-class": f"hardpoint_{name}.platform:{kind}Platform",
        "--device-class": device,
        "--worker-class": f"hardpoint_{name}.worker:{kind}Worker",
        "--runner-class": f"hardpoint_{name}.model_runner:{kind}ModelRunner",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider",
         "--tb=short", *(word for pair in classes.items() for word in pair), *map(str, files)],
        env={**os.environ, "PYTHONPATH": str(FAKE), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
    return done.stdout


ELSEWHERE = {"xpu": {"test_accelerator_sleep.py"}}
"""Of pools that keep addresses, beside graphs. What xpu has, the kit's suites and its own try."""


def files_of(name):
    return [file for file in FILES if file not in ELSEWHERE.get(name, ())]


CASES = [
    pytest.param(name, file, marks=() if (name, file) in QUICK else pytest.mark.slow)
    for name in NAMES
    for file in files_of(name)
]


@pytest.mark.parametrize(("name", "file"), CASES)
def test_the_runner_suite(name, file):
    run(name, "ordered_plugin", port_of(name), SUITES / file)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_runner_suite_on_the_substitute(name):
    run(name, "substitute_plugin", SUBSTITUTES[name], *(SUITES / file for file in files_of(name)))


@pytest.mark.parametrize(
    "name", ["cuda", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rocm", "xpu"))]
)
def test_graphs_are_the_platforms_default_where_nobody_sets_them(name):
    assert resolve(port_of(name)).default_graph_mode == DEFAULTS[name]
    told = run(name, "ordered_plugin", port_of(name), SUITES / "check_default_graphs.py")
    assert "3 passed" in told
