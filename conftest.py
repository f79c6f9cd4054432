"""What all tests of this repository share: how much of the kit runs each time."""

from __future__ import annotations

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a suite that is marked ``shared_workers``, leave the tests that start workers of their own
    to ``make test-slow``: where a start takes seconds, the rest needs one.
    """
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if {"shared_workers", "hardpoint_own_workers"} <= marks:
            item.add_marker(pytest.mark.slow)
