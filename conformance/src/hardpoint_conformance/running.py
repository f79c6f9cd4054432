"""Running the kit's tests under pytest. Called by the plugin, in the test's process.

The kit calls its test functions itself, innermost, and notes each outcome there: a fixture, mark or
hook of somebody else that keeps one from running, or turns its result round, leaves a test that the
certificate names as not run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest

from hardpoint_conformance.certificate import write_certificates
from hardpoint_conformance.contract import ContractError
from hardpoint_conformance.outcomes import Outcome, Result, is_refusal, judged
from hardpoint_conformance.run import Run
from hardpoint_conformance.suite import NotApplicable, Suite, capability_of, suite_of
from hardpoint_conformance.tampering import foreign_hooks

_RUN = pytest.StashKey[Run]()


def expect(item: pytest.Item) -> None:
    """Note a test that was found."""
    run_of(item.config).expect(_suite(item), item.name)


def run_test(item: pytest.Function) -> None:
    """Run one test; raise what pytest shows of one that did not simply pass."""
    suite = _suite(item)
    if suite.subject.executor is None:
        suite.subject.executor = item.config.getoption("--hardpoint-executor")
    result, error = _outcome(item, suite)
    if result.outcome is Outcome.FAILED or not (error is None or _harmless(result, error)):
        suite.subject.close()  # whatever it left is not to be met by the next test
    run_of(item.config).add(suite, result)
    if result.outcome not in (Outcome.PASSED, Outcome.NEVER):
        _tell(result, error)


def _harmless(result: Result, error: BaseException) -> bool:
    """Whether shared workers are as they were: what was asked for was refused, or, of a capability
    that is not there yet, an answer came and was another.
    """
    unlike = result.outcome is Outcome.NOT_YET and isinstance(error, ContractError)
    return unlike or is_refusal(error)


def leave(item: pytest.Item, following: pytest.Item | None) -> None:
    """End what a suite started if its last test is over."""
    suite = _suite(item)
    if following is None or suite_of(following) is not suite:
        suite.subject.remove()


def write(config: pytest.Config, path: Path) -> None:
    """Write the certificates of a session."""
    write_certificates(path, run_of(config), foreign_hooks(config.pluginmanager))


def run_of(config: pytest.Config) -> Run:
    """Return what this session's tests of the kit came to so far."""
    return config.stash.setdefault(_RUN, Run())


def _suite(item: pytest.Item) -> type[Suite]:
    suite = suite_of(item)
    if suite is None:
        raise TypeError(f"{item.nodeid} is no test of the kit")
    return suite


def _outcome(item: pytest.Function, suite: type[Suite]) -> tuple[Result, BaseException | None]:
    names = item._fixtureinfo.argnames  # noqa: SLF001 - as pytest's own implementation does
    arguments = {name: item.funcargs[name] for name in names}
    capability = capability_of(item)
    error: BaseException | None = None
    outcome, message = Outcome.PASSED, ""
    started = time.perf_counter()
    try:
        item.obj(**arguments)
    except NotApplicable as reason:
        outcome, message = Outcome.NOT_APPLICABLE, str(reason)
    except pytest.skip.Exception as skipped:
        error = skipped
        outcome, message = Outcome.NOT_RUN, f"the plugin under test skipped it: {skipped.msg}"
    except Exception as raised:  # noqa: BLE001 - it is the test's outcome
        error = raised
        outcome, message = Outcome.FAILED, f"{type(raised).__name__}: {raised}"
    if capability is not None and outcome not in (Outcome.NOT_APPLICABLE, Outcome.NOT_RUN):
        outcome, message = judged(suite.subject.support(capability), capability, error)
    result = Result(
        suite=suite.contract,
        test=item.name,
        outcome=outcome,
        capability=capability,
        executor=suite.subject.executor or suite.subject.run_by,
        seconds=time.perf_counter() - started,
        message=message,
    )
    return result, error


def _tell(result: Result, error: BaseException | None) -> NoReturn:
    if result.outcome is Outcome.NOT_APPLICABLE:
        pytest.skip(result.message)
    if result.outcome is Outcome.NOT_RUN:
        pytest.fail(result.message, pytrace=False)
    if result.outcome is Outcome.NOT_YET:
        pytest.xfail(result.message)
    if error is not None and result.message.endswith(str(error)):
        raise error
    pytest.fail(result.message, pytrace=False)
