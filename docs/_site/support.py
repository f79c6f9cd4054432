"""The page on support: which level each platform's tests have earned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hardpoint.registry import Registry
from hardpoint_runtime.accelerator.support import Evidence, read_evidence

RECORDED = ("cuda", "rocm", "xpu")
"""Platforms whose level is read off the results of their tests."""


def levels() -> str:
    """Return a table of all platforms here, with their levels."""
    registry = Registry.discover()
    rows = ["| platform | level | in its own words |", "|---|---|---|"]
    for name in registry.names("platform"):
        platform, record = registry.platform(name), registry.load("platform", name).record
        rows.append(f"| `{name}` | {platform.support_level} | {record.summary} |")
    return "\n".join(rows)


def results() -> str:
    """Return a table of the results that the recorded levels were read off."""
    rows = ["| platform | level | tests that passed | failed | which |", "|---|---|---|---|---|"]
    for name in RECORDED:
        rows += _of(name, read_evidence(f"hardpoint_{name}"))
    return "\n".join(rows)


def _of(name: str, evidence: Mapping[str, Evidence]) -> Iterator[str]:
    for level, told in evidence.items():
        which = ", ".join(f"`{test}`" for test in told.tests)
        yield f"| `{name}` | {level} | {told.passed} | {told.failed} | {which} |"
