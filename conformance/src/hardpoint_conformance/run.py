"""What one session's tests of the kit came to, by plugin."""

from __future__ import annotations

import time

from attrs import Factory, define, field

from hardpoint_conformance.outcomes import Result
from hardpoint_conformance.subject import Subject
from hardpoint_conformance.suite import Suite
from hardpoint_conformance.tampering import overridden, tests_of


@define(eq=False)
class PluginRun:
    """The tests of one plugin. ``missing`` are tests that were found and have no result;
    ``suites`` are the names of those that were adopted.
    """

    subject: Subject
    results: list[Result] = field(factory=list)
    suites: set[str] = field(factory=set)
    missing: set[tuple[str, str]] = field(factory=set)
    overrides: set[str] = field(factory=set)
    oracle: str = ""
    """What outputs were compared with."""
    believed: set[str] = field(factory=set)
    """What could not be compared, in sentences."""


@define(eq=False)
class Run:
    """All of a session."""

    started: float = field(default=Factory(time.time))
    plugins: dict[tuple[str | None, str], PluginRun] = field(factory=dict)

    def of(self, suite: type[Suite]) -> PluginRun:
        """Return the run of the plugin that ``suite`` is bound to."""
        subject = suite.subject
        return self.plugins.setdefault((subject.wanted_kind, subject.name), PluginRun(subject))

    def expect(self, suite: type[Suite], test: str) -> None:
        """Note a test that was found."""
        mine = self.of(suite)
        if suite.contract not in mine.suites:
            mine.suites.add(suite.contract)
            mine.missing |= {(suite.contract, name) for name in tests_of(suite)}
        mine.overrides |= set(overridden(suite))
        mine.missing.discard((suite.contract, test.partition("[")[0]))
        mine.missing.add((suite.contract, test))

    def add(self, suite: type[Suite], result: Result) -> None:
        """Note a result."""
        mine = self.of(suite)
        mine.results.append(result)
        mine.believed |= suite.subject.believed
        mine.oracle = suite.subject.oracle or mine.oracle
        mine.missing.discard((result.suite, result.test))
