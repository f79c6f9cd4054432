"""What tests of the driver share: counting the work of a piece of code."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session")
def lines_run():
    """Count the lines that ``work()`` runs in files whose path holds ``within``."""

    def count_lines(work, within="hardpoint"):
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if within not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
        return count

    return count_lines
