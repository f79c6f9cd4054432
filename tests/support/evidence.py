"""Which tests show what of each platform of GPUs, by level; running it writes the results down.

    python tests/support/evidence.py [PLATFORM[:LEVEL] ...]

Without a name it runs what is stale. Each level is written down when its tests have ended, so that
a cut leaves the others.

Levels: L0 detection with made-up machines, and the real library's answer where there is none; L1
the contracts' suites with the platform's classes on substitutes; L2 kernels in an interpreter, and
compiled for the target. L3 and L4 need the vendor's software and hardware.

With the results goes a digest of what they rest on: the tests, the platform and the shared code,
without comments, docstrings and blank lines. The slow lane says which records are older than the
tree; until they are made again, lists and pages go on to say what was recorded. A seal over all of
it says that nobody has written a record by hand.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
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
    "L2": (
        "runtime/src/hardpoint_runtime/kernels", "runtime/tests/kernels",
        "runtime/tests/runner/check_kernels.py", "runtime/tests/model/test_attention_paged.py",
    ),
}  # fmt: skip
"""Level -> files, and folders of sources, beside its tests, with the platform's name to fill in.
Not the engine nor what all platforms share with the processor's: those have tests of their own.
"""
SOURCES = (".py", ".c")
Results = dict[tuple[tuple[str, ...], str], dict[str, object]]
"""(tests, digest) -> results."""


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
        text = path.read_text()
        told = what_runs(text) if path.suffix == ".py" else text
        total.update(hashlib.sha256(told.encode()).digest())
    return total.hexdigest()[:32]


def what_runs(source: str) -> str:
    """Return the lines of a module without comments, blank ones and texts that stand alone."""
    lines = [*source.splitlines(), ""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            lines[node.lineno - 1 : node.lineno - 1 + count] = [""] * count
    return "\n".join(line.rstrip() for line in lines if line.strip())


def seal(told: dict[str, object]) -> str:
    """Return what only this program writes beside a level's results."""
    plain = {key: value for key, value in told.items() if key != "seal"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def stale(name: str) -> list[str]:
    """Return the levels of which there is no record of the tests and sources that are here."""
    path = record_of(name)
    found = json.loads(path.read_text()) if path.is_file() else {}
    return [
        level
        for level, tests in EVIDENCE[name].items()
        if not (told := found.get(level))
        or told["tests"] != list(tests)
        or told.get("digest") != digest(name, level)
        or told.get("seal") != seal(told)
    ]


def record_of(name: str) -> Path:
    """Return the file that the platform's level is read off."""
    return ROOT / f"plugins/{name}/src/hardpoint_{name}/support.json"


def results(tests: tuple[str, ...]) -> dict[str, object]:
    """Run tests, the slow ones too; return how many passed, failed and were skipped: what has no
    object here is no failure, and shows nothing. A file of which nothing passed has failed. Exits
    where pytest could not run them all.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
             *tests],
            cwd=ROOT, env={**given, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise SystemExit(f"pytest ended with {done.returncode}: not all of {tests} were run")
        cases = list(ET.parse(report).getroot().iter("testcase"))
    outcomes = [(case, {child.tag for child in case}) for case in cases]
    skipped = [case for case, tags in outcomes if "skipped" in tags]
    failed = [case for case, tags in outcomes if tags & {"failure", "error"}]
    passed = [case for case in cases if case not in skipped and case not in failed]
    empty = [test for test in tests if not any(is_of(case, test) for case in passed)]
    return {
        "tests": list(tests), "passed": len(passed), "failed": len({*failed, *empty}),
        "skipped": len(skipped),
    }  # fmt: skip


def is_of(case: ET.Element, test: str) -> bool:
    """Whether a result is of the test file, or of the test with any parameters."""
    path, _, name = test.partition("::")
    found = case.get("name", "")
    same_file = Path(path).stem in case.get("classname", "").split(".")
    return same_file and name in ("", found, found.partition("[")[0])


def recorded(name: str, level: str, known: Results) -> dict[str, object]:
    """Return the results of a level's tests, with the digest and the seal; those of tests that were
    run for another platform are ``known``. Exits where sources changed while the tests ran: nobody
    could say what they have shown.
    """
    before, tests = digest(name, level), EVIDENCE[name][level]
    key = tests, before
    if key not in known:
        known[key] = results(tests)
    if digest(name, level) != before:
        raise SystemExit(f"{name} {level}: sources changed while its tests ran; run it again")
    told = {**known[key], "digest": before}
    return {**told, "seal": seal(told)}


def main(names: list[str]) -> None:
    """Write down the results of the named platforms, or of a level of one; else what is stale."""
    known: Results = {}
    for each in names or [f"{name}:{level}" for name in EVIDENCE for level in stale(name)]:
        name, _, only = each.partition(":")
        for level in [only] if only else EVIDENCE[name]:
            told = recorded(name, level, known)
            write(name, level, told)


def write(name: str, level: str, told: dict[str, object]) -> None:
    """Put a level's record into the platform's file, whole or not at all."""
    path = record_of(name)
    found = json.loads(path.read_text()) if path.is_file() else {}
    levels = {**found, level: told}
    ordered = {each: levels[each] for each in EVIDENCE[name] if each in levels}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
        file.write(json.dumps(ordered, indent=2) + "\n")
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
