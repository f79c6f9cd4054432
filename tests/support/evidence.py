"""Which tests show what of each platform of GPUs, by level; running it writes the results down.

    python tests/support/evidence.py [PLATFORM[:LEVEL] ...]

Levels: L0 detection with made-up machines, and the real library's answer where there is none; L1
the contracts' suites with the platform's classes on substitutes; L2 kernels in an interpreter, and
compiled for the target. L3 and L4 need the vendor's software and hardware.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def of(name: str, *kernels: str) -> dict[str, tuple[str, ...]]:
    """Return level -> test files, or single tests, of the platform ``name``."""
    folder = f"plugins/{name}/tests"
    levels = {
        "L0": (f"{folder}/test_{name}_detection.py", "tests/gpus/test_gpu_platforms.py"),
        "L1": (
            f"{folder}/test_{name}_conformance.py",
            f"tests/gpus/test_gpu_runners.py::test_the_runner_suite[{name}-test_runner_steps.py]",
        ),
    }
    return {**levels, "L2": kernels} if kernels else levels


KERNELS = (
    "runtime/tests/kernels/test_kernels_interpreted.py",
    "runtime/tests/kernels/test_kernels_compiled.py",
)
"""Of every target: a kernel that is right for one vendor's devices alone is not what is offered."""
EVIDENCE = {"cuda": of("cuda", *KERNELS), "rocm": of("rocm", *KERNELS), "xpu": of("xpu")}


def record_of(name: str) -> Path:
    """Return the file that the platform's level is read off."""
    return ROOT / f"plugins/{name}/src/hardpoint_{name}/support.json"


def results(tests: tuple[str, ...]) -> dict[str, object]:
    """Run tests, the slow ones too; return how many passed and failed. A skipped one counts for
    nothing: what has no object here is no failure, and shows nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
             *tests],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        suite = ET.parse(report).getroot().find("testsuite")
    if suite is None:
        raise SystemExit(f"no results of {tests}")
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"tests": list(tests), "passed": total - skipped - failed, "failed": failed}


def main(names: list[str]) -> None:
    """Write down the results of the named platforms, or of all; of one level, where it is named."""
    for each in names or EVIDENCE:
        name, _, only = each.partition(":")
        path = record_of(name)
        found = json.loads(path.read_text()) if only else {}
        for level, tests in EVIDENCE[name].items():
            if level == (only or level):
                found[level] = results(tests)
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
