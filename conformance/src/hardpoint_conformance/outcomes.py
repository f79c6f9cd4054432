"""What each test of the kit came to, and how a declaration turns a test's end into an outcome."""

from __future__ import annotations

from enum import Enum

from attrs import frozen
from hardpoint.capabilities import NEVER, NOT_YET, SINCE, YES, Capability, Support
from hardpoint.errors import ConfigError, RemoteError, UnsupportedError
from hardpoint.platform import Platform


class Outcome(Enum):
    """How a test ended. The value is the word shown to people."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_YET = "not yet"
    NEVER = "never"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"

    @property
    def good(self) -> bool:
        """Whether a conformant plugin may have it."""
        return self not in (Outcome.FAILED, Outcome.NOT_RUN)


@frozen(kw_only=True)
class Result:
    """One test: ``test`` is its name with its parameters, ``capability`` what it is of (None: of
    the contract itself), ``message`` why it failed or what does not apply.
    """

    suite: str
    test: str
    outcome: Outcome
    capability: Capability | None = None
    executor: str = ""
    seconds: float = 0.0
    message: str = ""


def declared(platform: Platform, capability: Capability, api: tuple[int, int]) -> Support | None:
    """Return what the plugin declares: NOT_YET for a capability that is newer than its ``api``,
    None for one that it should have declared.
    """
    answer = platform.capabilities.get(capability)
    if answer is None and SINCE[capability] > api:
        return NOT_YET
    return answer


def judged(
    support: Support | None, capability: Capability, error: BaseException | None
) -> tuple[Outcome, str]:
    """Return what a test of ``capability`` that ended with ``error`` (None: well) comes to under
    the declaration ``support``, and why.
    """
    name = f"Capability.{capability.name}"
    if support is None:
        return Outcome.FAILED, (
            f"the platform declares nothing for {name}; each capability needs YES, NOT_YET or "
            "NEVER (hardpoint.platform.Platform.capabilities)"
        )
    if support is YES:
        if error is None:
            return Outcome.PASSED, ""
        return Outcome.FAILED, f"{type(error).__name__}: {error}"
    if support is NOT_YET:
        if error is None:
            return Outcome.FAILED, (
                f"the platform declares {name} as NOT_YET, and yet this test of it passes; declare "
                "YES (a strict xfail)"
            )
        return Outcome.NOT_YET, f"{name} is declared NOT_YET"
    if support is NEVER and is_unsupported(error):
        return Outcome.NEVER, f"{name} is declared NEVER, and refused with UnsupportedError"
    seen = "it was served" if error is None else f"it raised {type(error).__name__}: {error}"
    return Outcome.FAILED, (
        f"the platform declares {name} as NEVER, so asking for it must raise UnsupportedError; "
        f"{seen} (hardpoint.capabilities.Support)"
    )


def is_refusal(error: BaseException) -> bool:
    """Whether ``error`` says that something was refused before it was begun."""
    cause = error.__cause__ if isinstance(error, RemoteError) else error
    return isinstance(cause, ConfigError | UnsupportedError)


def is_unsupported(error: BaseException | None) -> bool:
    """Whether ``error`` is an UnsupportedError, or a worker's."""
    if isinstance(error, RemoteError):
        error = error.__cause__
    return isinstance(error, UnsupportedError)
