"""What the conformance kit tests, read off its suites."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import hardpoint_conformance as kit
from hardpoint.capabilities import Capability
from hardpoint_conformance.suite import NEEDS, Suite
from tables import table

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "tests" / "mutants"
SUITES = ("PluginSuite", "PlatformSuite", "WorkerSuite", "ModelRunnerSuite", "ExecutorSuite")


def sections() -> str:
    """Return a table of the tests of each suite."""
    return "\n".join(_section(getattr(kit, name)) for name in SUITES)


def mutants() -> str:
    """Return a table of the broken plugins, and which test notices each."""
    before = list(sys.path)
    sys.path += map(str, (MUTANTS, *(ROOT / "examples" / "out_of_tree").glob("*/src")))
    try:
        from catalogue import MUTATIONS
    finally:
        sys.path[:] = before
    rows = [
        (each.wrong, each.suite, ", ".join(map(_sentence, each.caught_by)))
        for each in MUTATIONS
        if each.caught_by
    ]
    return table(("what is wrong", "suite", "the test that notices"), rows)


def _sentence(test: str) -> str:
    name, bracket, rest = test.rpartition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " ") + (f" `{bracket}{rest}`" if rest else "")


def tests_of(suite: type[Suite]) -> dict[str, object]:
    """Return name -> test, in the order in which they are written."""
    found = {
        name: each
        for kind in reversed(suite.__mro__)
        for name, each in vars(kind).items()
        if name.startswith("test_")
    }
    return {name: getattr(suite, name) for name in found}


def _section(suite: type[Suite]) -> str:
    rows = [
        (name.removeprefix("test_").replace("_", " "), _first(test), _capability(test))
        for name, test in tests_of(suite).items()
    ]
    text = " ".join((inspect.getdoc(suite) or "").split())
    return f"### {suite.__name__}\n\n{text}\n\n{table(('test', 'how', 'capability'), rows)}"


def _first(test: object) -> str:
    text = " ".join((inspect.getdoc(test) or "").split("\n\n")[0].split())
    return text.replace("``", "`")


def _capability(test: object) -> str:
    wanted = getattr(test, NEEDS, None)
    return wanted.value if isinstance(wanted, Capability) else "several" if wanted else ""
