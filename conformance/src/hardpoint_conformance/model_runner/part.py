"""What the parts of the ModelRunner suite share."""

from __future__ import annotations

from functools import cached_property

from hardpoint.capabilities import YES, Capability

from hardpoint_conformance.generation import Bench
from hardpoint_conformance.suite import Suite


class ModelRunnerPart(Suite):
    """Some of the suite's tests."""

    @cached_property
    def bench(self) -> Bench:
        """A group of workers that can execute, its oracle and its driver; without requests,
        as the test of this object finds it.
        """
        return Bench.of(self.subject)

    def supports(self, capability: Capability) -> bool:
        """Whether the platform says yes."""
        return self.subject.support(capability) is YES

    def other(self, **overrides: object) -> Bench:
        """Return a bench of its own, with other configuration. What is refused before anything
        starts leaves the shared one as it is.
        """
        prepared = self.subject.prepare(None, **overrides)
        self.subject.release()  # two groups at once may be more than the device holds
        return Bench(self.subject, self.subject.started(prepared))
