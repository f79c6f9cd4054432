"""What of a platform tests have shown: a file beside its code, written from their results.

``support.json`` has, for each level, the test files that were run and how many tests passed and
failed. A platform's level is read off it, so it never claims more. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from attrs import frozen

LEVELS = ("L0", "L1", "L2", "L3", "L4")
NOTHING = "none"
"""What a platform has of which nothing was shown."""


@frozen(kw_only=True)
class Evidence:
    """The results of one level's tests."""

    tests: tuple[str, ...]
    passed: int
    failed: int

    @property
    def holds(self) -> bool:
        """Whether there were tests, and all passed."""
        return self.passed > 0 and not self.failed


def read_evidence(package: str) -> Mapping[str, Evidence]:
    """Return level -> results, of the distribution whose package it is."""
    text = files(package).joinpath("support.json").read_text(encoding="utf-8")
    return {
        level: Evidence(
            tests=tuple(told["tests"]), passed=int(told["passed"]), failed=int(told["failed"])
        )
        for level, told in json.loads(text).items()
    }


def earned(evidence: Mapping[str, Evidence], levels: Sequence[str] = LEVELS) -> str:
    """Return the highest level that was shown with all those below it."""
    reached = NOTHING
    for level in levels:
        if level not in evidence or not evidence[level].holds:
            break
        reached = level
    return reached


def recorded_level(package: str) -> str:
    """Return what ``Platform.support_level`` says for the platform in ``package``."""
    return earned(read_evidence(package))
