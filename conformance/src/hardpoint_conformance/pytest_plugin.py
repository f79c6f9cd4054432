"""The pytest plugin (entry point ``pytest11``): hands the kit's tests to the kit.

It is loaded in every test run of the environment, so it imports nothing of the kit before a test
module has adopted a suite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SUITE = "hardpoint_conformance.suite"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("hardpoint", "Hardpoint's conformance kit")
    group.addoption(
        "--hardpoint-executor", metavar="NAME", default=None,
        help="executor that runs a platform's workers; unset: the platform's default",
    )  # fmt: skip
    group.addoption(
        "--hardpoint-certificate", metavar="FILE", default=None, type=Path,
        help="write the certificates as JSON; not with pytest-xdist",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Name the kit's mark; refuse a certificate that would miss the tests of other processes."""
    config.addinivalue_line(
        "markers",
        "hardpoint_own_workers: a test of the conformance kit that starts workers of its own",
    )
    if config.getoption("--hardpoint-certificate") and config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "--hardpoint-certificate needs all tests in one process: leave --numprocesses out"
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note every test of the kit that was found, before anybody can drop it."""
    if _is_ours(item):
        from hardpoint_conformance import running

        running.expect(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of the kit and turn its end into an outcome."""
    if not _is_ours(pyfuncitem):
        return None
    from hardpoint_conformance import running

    running.run_test(pyfuncitem)
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what a suite started when its last test is over."""
    if _is_ours(item):
        from hardpoint_conformance import running

        running.leave(item, nextitem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the certificates."""
    path = session.config.getoption("--hardpoint-certificate")
    if path is not None:
        from hardpoint_conformance import running

        running.write(session.config, path)


def _is_ours(item: pytest.Item) -> bool:
    suite = sys.modules.get(_SUITE)
    return suite is not None and suite.suite_of(item) is not None
