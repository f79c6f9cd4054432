"""Which tests show what of each platform of GPUs, by level; running it writes the results down.

    python tests/support/evidence.py [PLATFORM[:LEVEL] ...]

Levels: L0 detection with made-up machines, and the real library's answer where there is none; L1
the contracts' suites with the platform's classes on substitutes; L2 kernels in an interpreter, and
compiled for the target. L3 and L4 need the vendor's software and hardware.

With the results goes a digest of what they rest on: the tests, the platform and the shared code.
The slow lane says which records are older than the tree; until they are made again, lists and pages
go on to say what was recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


RUNNER_SUITES = (
    "test_runner_steps.py", "test_runner_graphs.py", "test_runner_graph_memory.py",
    "test_accelerator_memory.py",
)  # fmt: skip
"""What of the runner's suites a platform's own classes pass on the device that enforces the order
of work: steps, graphs, and the account of memory.
"""
ORDER = tuple(
    f"runtime/tests/ordered_fake/test_ordered_runner.py::{test}"
    for test in (
        "test_the_device_finds_out_what_is_wrong_and_lets_pass_what_is_right",
        "test_graphs_figures_and_sleep_on_the_device",
    )
)
"""That this device does enforce it, on what all platforms share."""
ADDRESSES_STAY = (
    "tests/gpus/test_gpu_runners.py::test_the_runner_suite[{}-test_accelerator_sleep.py]",
    "tests/gpus/test_gpu_virtual_memory.py",
)
"""How memory sleeps on drivers that part it from its addresses."""
ELSEWHERE = ("plugins/{0}/tests/test_{0}_worker.py",)
"""How it does on others."""


def of(name: str, sleep: tuple[str, ...], *kernels: str) -> dict[str, tuple[str, ...]]:
    """Return level -> test files, or single tests, of the platform ``name``."""
    folder = f"plugins/{name}/tests"
    suite = f"tests/gpus/test_gpu_runners.py::test_the_runner_suite[{name}-"
    levels = {
        "L0": (f"{folder}/test_{name}_detection.py", "tests/gpus/test_gpu_platforms.py"),
        "L1": (
            f"{folder}/test_{name}_conformance.py",
            *(f"{suite}{file}]" for file in RUNNER_SUITES),
            *ORDER,
            *(each.format(name) for each in sleep),
        ),
    }
    return {**levels, "L2": kernels} if kernels else levels


KERNELS = (
    "runtime/tests/kernels/test_kernels_interpreted.py",
    "runtime/tests/kernels/test_kernels_compiled.py",
)
"""Of every target: a kernel that is right for one vendor's devices alone is not what is offered."""
EVIDENCE = {
    "cuda": of("cuda", ADDRESSES_STAY, *KERNELS),
    "rocm": of("rocm", ADDRESSES_STAY, *KERNELS),
    "xpu": of("xpu", ELSEWHERE),
}
RESTS_ON = {
    "L0": ("plugins/{}/src", "plugins/{}/tests", "runtime/src/hardpoint_runtime/accelerator"),
    "L1": (
        "plugins/{}/src", "plugins/{}/tests", "runtime/src", "conformance/src",
        "runtime/tests/runner", "runtime/tests/ordered_fake", "tests/gpus/fake_driver.c",
    ),
    "L2": ("runtime/src/hardpoint_runtime/kernels", "runtime/tests/kernels"),
}  # fmt: skip
"""Level -> files, and folders of sources, beside its tests, with the platform's name to fill in.
Not the engine nor what all platforms share with the processor's: those have tests of their own.
"""
SOURCES = (".py", ".c")


def sources(name: str, level: str) -> Iterator[Path]:
    """Give what a level of the platform rests on, in one order everywhere."""
    tests = (test.partition("::")[0] for test in EVIDENCE[name][level])
    found = set()
    for path in (ROOT / each for each in (*tests, *(p.format(name) for p in RESTS_ON[level]))):
        found |= {path} if path.is_file() else set(path.rglob("*"))
    yield from sorted(path for path in found if path.suffix in SOURCES)


def digest(name: str, level: str) -> str:
    """Return what changes with any of them."""
    total = hashlib.sha256()
    for path in sources(name, level):
        total.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]


def stale(name: str) -> list[str]:
    """Return the levels whose record is of other tests or sources than are here."""
    return [
        level
        for level, told in json.loads(record_of(name).read_text()).items()
        if told["tests"] != list(EVIDENCE[name][level]) or told.get("digest") != digest(name, level)
    ]


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


def recorded(name: str, level: str) -> dict[str, object]:
    """Return the results of a level's tests, with the digest. Exits where sources changed while the
    tests ran: nobody could say what they have shown.
    """
    before = digest(name, level)
    found = results(EVIDENCE[name][level])
    if digest(name, level) != before:
        raise SystemExit(f"{name} {level}: sources changed while its tests ran; run it again")
    return {**found, "digest": before}


def main(names: list[str]) -> None:
    """Write down the results of the named platforms, or of all; of one level, where it is named."""
    for each in names or EVIDENCE:
        name, _, only = each.partition(":")
        path = record_of(name)
        found = json.loads(path.read_text()) if only else {}
        for level in EVIDENCE[name]:
            if level == (only or level):
                found[level] = recorded(name, level)
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
