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
    """The tests of one plugin. ``suites`` are those that were adopted, one contract's perhaps
    several times, and ``missing`` tests of each that were found and have no result.
    """

    subject: Subject
    results: list[Result] = field(factory=list)
    suites: list[type[Suite]] = field(factory=list)
    missing: set[tuple[type[Suite], str]] = field(factory=set)
    overrides: set[str] = field(factory=set)
    oracle: str = ""
    """What outputs were compared with."""
    believed: set[str] = field(factory=set)
    """What could not be compared, in sentences."""

    @property
    def subjects(self) -> list[Subject]:
        """The plugin as each suite was bound to it: with settings and a probe of its own."""
        return [suite.subject for suite in self.suites] or [self.subject]


@define(eq=False)
class Run:
    """All of a session."""

    started: float = field(default=Factory(time.time))
    plugins: dict[tuple[str | None, str], PluginRun] = field(factory=dict)

    def of(self, suite: type[Suite]) -> PluginRun:
        """Return the run of the plugin that ``suite`` is bound to."""
        subject = suite.subject
        return self.plugins.setdefault((subject.found_kind, subject.name), PluginRun(subject))

    def expect(self, suite: type[Suite], test: str) -> None:
        """Note a test that was found."""
        mine = self.of(suite)
        if suite not in mine.suites:
            mine.suites.append(suite)
            mine.missing |= {(suite, name) for name in tests_of(suite)}
        mine.overrides |= set(overridden(suite))
        mine.missing.discard((suite, test.partition("[")[0]))
        mine.missing.add((suite, test))

    def add(self, suite: type[Suite], result: Result) -> None:
        """Note a result."""
        mine = self.of(suite)
        mine.results.append(result)
        mine.believed |= suite.subject.believed
        mine.oracle = suite.subject.oracle or mine.oracle
        mine.missing.discard((suite, result.test))
