"""What the parts of the Platform suite share."""

from __future__ import annotations

from hardpoint.records import Limits

from hardpoint_conformance.suite import Suite


class PlatformPart(Suite):
    """Some of the suite's tests."""

    def limits(self) -> Limits:
        """Return the platform's limits for the kit's own configuration."""
        prepared = self.subject.prepare()
        return prepared.platform.limits(prepared.config)
