"""Declarations decide what must come of a test."""

from __future__ import annotations

import pytest
from hardpoint.capabilities import NEVER, NOT_YET, SINCE, YES, Capability
from hardpoint.errors import RemoteError, UnsupportedError
from hardpoint_conformance.outcomes import Outcome, declared, judged
from hardpoint_dummy.platform import DummyPlatform

SLEEP = Capability.SLEEP


def refused():
    return UnsupportedError("sleep", "platform 'x'")


def remote(cause):
    error = RemoteError("m", rank=0, type_name="E", remote_traceback="")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("support", "error", "outcome"),
    [
        (YES, None, Outcome.PASSED),
        (YES, refused(), Outcome.FAILED),
        (NOT_YET, refused(), Outcome.NOT_YET),
        (NOT_YET, ValueError("anything"), Outcome.NOT_YET),
        (NOT_YET, None, Outcome.FAILED),
        (NEVER, refused(), Outcome.NEVER),
        (NEVER, remote(refused()), Outcome.NEVER),
        (NEVER, ValueError("something else"), Outcome.FAILED),
        (NEVER, None, Outcome.FAILED),
        (None, None, Outcome.FAILED),
        (None, refused(), Outcome.FAILED),
    ],
)
def test_a_declaration_turns_an_end_into_an_outcome(support, error, outcome):
    seen, message = judged(support, SLEEP, error)
    assert seen is outcome
    assert seen is Outcome.PASSED or "SLEEP" in message or "UnsupportedError" in message


def test_a_capability_newer_than_the_plugin_counts_as_not_yet(monkeypatch):
    platform = DummyPlatform()
    monkeypatch.setattr(DummyPlatform, "capabilities", {})
    assert declared(platform, SLEEP, (2, 0)) is None
    monkeypatch.setitem(SINCE, SLEEP, (2, 1))
    assert declared(platform, SLEEP, (2, 0)) is NOT_YET
    assert declared(platform, SLEEP, (2, 1)) is None
