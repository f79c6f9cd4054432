"""Runs the kit against mutants and prints the table mutant -> test that failed.

    python tests/mutants/run_mutants.py [--json | --list] [NAME ...]

Exit code 0 if every mutant was caught by the tests that it names and every twin passed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from attrs import field, frozen

CRASH = re.compile(
    r"(RemoteError: worker rank \d+ raised )?"
    r"(AttributeError|ImportError|ModuleNotFoundError|NameError|TypeError|UnboundLocalError)\b"
)
"""How a failure begins that comes of a mistake in a mutant and not of what is wrong with it."""
LEAK_SECONDS = 3.0
"""For how long a leak is looked at until it is one: mutants have them for good."""

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "out_of_tree"
sys.path[:0] = [str(HERE), *(str(path) for path in sorted(EXAMPLES.glob("*/src")))]

from catalogue import MUTATIONS  # noqa: E402 - found by the line above
from mutation import Mutation  # noqa: E402
from site_of_mutants import write_site  # noqa: E402


@frozen(kw_only=True)
class Finding:
    """What the kit said of one mutant: ``failed`` are the tests that failed, with what was said,
    ``passed`` how many did not.
    """

    mutation: Mutation
    failed: Mapping[str, str] = field(factory=dict)
    passed: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """The tests that had to fail and did not."""
        return tuple(
            test for test in self.mutation.caught_by
            if not any(_is(test, each) for each in self.failed)
        )  # fmt: skip

    @property
    def crashed(self) -> str:
        """What says that the mutant could not do its work at all: it is wrong in another way than
        it means to be.
        """
        return next((said for said in self.failed.values() if CRASH.match(said)), "")

    @property
    def verdict(self) -> str:
        """``caught``, ``crashed``, ``caught by another``, ``survived``; of a twin ``passes`` or
        ``fails``.
        """
        if self.mutation.is_twin:
            return "fails" if self.failed or not self.passed else "passes"
        if not self.missing:
            return "crashed" if self.crashed else "caught"
        return "caught by another" if self.failed else "survived"


def _is(meant: str, failed: str) -> bool:
    """Whether ``failed`` is the test meant; one that is meant without parameters is meant with
    any.
    """
    return failed == meant or ("[" not in meant and failed.partition("[")[0] == meant)


class Collector:
    """A pytest plugin that takes what the kit noted."""

    def __init__(self) -> None:
        self.failed: dict[str, dict[str, str]] = {}
        self.passed: dict[str, int] = {}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from hardpoint_conformance.running import run_of

        for (_, name), run in run_of(session.config).plugins.items():
            outcomes = {result.test: result.outcome for result in run.results}
            bad = {each.test: each.message for each in run.results if not each.outcome.good}
            self.failed[name] = bad
            self.passed[name] = len(outcomes) - len(bad)


def examine(mutations: Sequence[Mutation]) -> list[Finding]:
    """Run the kit against ``mutations``, in this process: the tests that each names, and for those
    that pass them, and for twins, the whole suite.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as text:
        folder = Path(text)
        write_site(folder, mutations)
        sys.path.insert(0, str(folder))
        lines = ["from hardpoint_conformance import *", ""]
        lines += [f"Test_{each.module} = {each.suite}.of({each.name!r})" for each in mutations]
        test = folder / "test_the_mutants.py"
        test.write_text("\n".join(lines) + "\n")
        named = {
            each.name: [f"{test}::Test_{each.module}::{name}" for name in each.caught_by]
            for each in mutations
        }
        findings = {each.name: Finding(mutation=each) for each in mutations}
        findings |= _run(folder, [node for nodes in named.values() for node in nodes], mutations)
        rest = [each for each in mutations if findings[each.name].missing or each.is_twin]
        findings |= _run(folder, [f"{test}::Test_{each.module}" for each in rest], rest)
    return [findings[each.name] for each in mutations]


def _run(folder: Path, nodes: list[str], mutations: Sequence[Mutation]) -> dict[str, Finding]:
    """Run some tests; return what became of the mutants that they are of."""
    if not nodes:
        return {}
    from hardpoint_conformance import watching

    watching.left_after.__defaults__ = (LEAK_SECONDS,)
    collector = Collector()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-W", "ignore"]
    arguments += [
        "--rootdir",
        str(folder),
        "--import-mode=importlib",
        "--continue-on-collection-errors",
    ]
    code = pytest.main([*arguments, *nodes], plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")
    return {
        each.name: Finding(
            mutation=each,
            failed=collector.failed[each.name],
            passed=collector.passed[each.name],
        )
        for each in mutations if each.name in collector.failed
    }  # fmt: skip


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a Markdown table."""
    rows = [
        "| mutant | what is wrong with it | test that must fail | verdict |",
        "|---|---|---|---|",
    ]
    for finding in findings:
        mutation = finding.mutation
        meant = ", ".join(f"`{test}`" for test in mutation.caught_by) or "none"
        verdict = finding.verdict
        if verdict == "caught by another":
            verdict += ": " + ", ".join(finding.failed)
        elif verdict == "crashed":
            verdict += ": " + " ".join(finding.crashed.split())
        rows.append(f"| {mutation.name} | {mutation.wrong} | {meant} | {verdict} |")
    return "\n".join(rows)


def as_documents(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """Return the findings as plain data."""
    return [
        {
            "name": finding.mutation.name, "suite": finding.mutation.suite,
            "verdict": finding.verdict, "missing": finding.missing, "failed": list(finding.failed),
            "crashed": finding.crashed, "passed": finding.passed,
        }
        for finding in findings
    ]  # fmt: skip


def _listed(mutation: Mutation) -> dict[str, object]:
    import hardpoint_conformance

    suite = getattr(hardpoint_conformance, mutation.suite)
    tests = [name for name in dir(suite) if name.startswith("test_")]
    return {"name": mutation.name, "caught_by": mutation.caught_by, "tests": tests}


def main() -> int:
    """Run what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.list:
        print(json.dumps([_listed(each) for each in MUTATIONS]))
        return 0
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no mutant {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(MUTATIONS)
    told = io.StringIO()
    with contextlib.redirect_stdout(told if options.json else sys.stderr):
        findings = examine(chosen)
    print(json.dumps(as_documents(findings)) if options.json else table(findings))
    return int(any(each.verdict not in ("caught", "passes") for each in findings))


if __name__ == "__main__":
    sys.exit(main())
