"""Run the fault matrix and print it: ``python tests/faults/table.py [--cpu] [pytest options]``.

Each cell shows what the fault ended in, and how many seconds after it (or after the call in which
it came); ``-`` is a cell that means nothing, with its reason below; FAILED is one that broke.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fault_cells import CELLS, KINDS, PHASES, TARGETS  # noqa: E402


class Results:
    """A pytest plugin that keeps what became of each cell."""

    def __init__(self):
        self.seconds = {}
        self.failed = set()

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("[")[2].rstrip("]")
        if report.failed:
            self.failed.add(name)
        if report.when == "call":
            given = dict(report.user_properties)
            self.seconds[name] = given.get("seconds", report.duration)


def table(results, target):
    lines = [f"| {target} | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for kind in KINDS:
        row = []
        for phase in PHASES:
            [cell] = [
                each
                for each in CELLS
                if (each.kind, each.phase, each.target) == (kind, phase, target)
            ]
            row.append(shown(results, cell))
        lines.append(f"| {kind} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def shown(results, cell):
    if not cell.outcome:
        return "-"
    if cell.name in results.failed:
        return "FAILED"
    seconds = results.seconds.get(cell.name)
    return "not run" if seconds is None else f"{cell.outcome} {seconds:.1f} s"


def reasons():
    found = {}
    for cell in CELLS:
        if cell.reason:
            found.setdefault(cell.reason, []).append(f"{cell.kind}/{cell.phase}/{cell.target}")
    return "\n".join(f"* {', '.join(cells)}: {reason}" for reason, cells in found.items())


def main(arguments):
    results = Results()
    files = ["test_fault_matrix.py"]
    if "--cpu" in arguments:
        arguments.remove("--cpu")
        files.append("test_fault_cpu.py")
    code = pytest.main(
        ["-q", "--no-header", *[str(HERE / each) for each in files], *arguments], plugins=[results]
    )
    for target in TARGETS:
        print(f"\n{table(results, target)}")
    print(f"\nCells that mean nothing:\n\n{reasons()}")
    rest = {name: took for name, took in results.seconds.items() if "-rank_" in name and (
        name.endswith(("-tp", "-pp")))}  # fmt: skip
    if rest:
        print("\n| on the cpu | |\n|---|---|")
        for name, took in rest.items():
            print(f"| {name} | {'FAILED' if name in results.failed else f'{took:.1f} s'} |")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
