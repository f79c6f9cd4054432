"""What the five suites have in common: how one is bound to a plugin, and what each test is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import pytest
from hardpoint.capabilities import Capability

from hardpoint_conformance.probe import Probe
from hardpoint_conformance.subject import Subject

_F = TypeVar("_F", bound=Callable[..., Any])

NEEDS = "_hardpoint_needs"
"""Attribute of a test function: the capability that it is of, or the parameter that holds it."""


def needs(capability: Capability | str) -> Callable[[_F], _F]:
    """Say that a test is of ``capability`` (a text names the test's parameter that holds it): the
    plugin's declaration decides what must come of it.

    YES: it must pass. NOT_YET: it must fail (a strict xfail). NEVER: it must raise
    UnsupportedError. Undeclared, though the plugin's API has it: it fails.
    """

    def mark(function: _F) -> _F:
        setattr(function, NEEDS, capability)
        return function

    return mark


own_workers = pytest.mark.hardpoint_own_workers
"""Marks a test that starts workers beside those that the tests of a suite share: the slow ones of a
platform whose start takes long. ``pytest -m "not hardpoint_own_workers"`` is the quick choice.
"""


class NotApplicable(BaseException):
    """How a test of the kit ends that has no object here. A skip of anybody else is none of it."""


def not_applicable(reason: str) -> NoReturn:
    """End a test that has no object here (workers without processes cannot be killed, say). The
    certificate says so; it is neither a pass nor a failure.
    """
    raise NotApplicable(f"not applicable: {reason}")


def suite_of(item: pytest.Item) -> type[Suite] | None:
    """Return the suite that a test belongs to, if it is one of the kit's."""
    owner = getattr(item, "cls", None)
    is_bound = isinstance(owner, type) and issubclass(owner, Suite) and hasattr(owner, "subject")
    return owner if is_bound else None


def capability_of(item: pytest.Function) -> Capability | None:
    """Return the capability that a test is of."""
    wanted = getattr(item.function, NEEDS, None)
    if isinstance(wanted, str):
        wanted = item.callspec.params[wanted]
    return wanted if isinstance(wanted, Capability) else None


class Suite:
    """Tests of one contract. Adopted in one line: ``TestPlatform = PlatformSuite.of("acme")``.

    ``subject`` is the plugin under test. The tests start what they need by it, so that whatever
    goes wrong is the outcome of a test.
    """

    contract: ClassVar[str]
    """The name of the suite in certificates."""
    kinds: ClassVar[tuple[str, ...]] = ("platform",)
    """The kinds of plugin that it is for."""
    subject: ClassVar[Subject]
    __test__ = False

    @classmethod
    def of(
        cls,
        name: str,
        *,
        kind: str | None = None,
        executor: str | None = None,
        settings: Mapping[str, object] | None = None,
        probe: Probe | type[Probe] | None = None,
    ) -> type[Self]:
        """Return this suite, bound to the plugin ``name``.

        ``kind`` (``platform`` or ``executor``) is needed only where both have that name.
        ``executor`` is the one that a platform's workers are run by; unset, the option
        ``--hardpoint-executor``, else the platform's default. ``settings`` are configuration keys,
        beside those of the probe; ``probe`` overrides the one that is installed.
        """
        made = probe() if isinstance(probe, type) else probe
        wanted = kind or (cls.kinds[0] if len(cls.kinds) == 1 else None)
        subject = Subject(name, kind=wanted, executor=executor, settings=settings or {}, probe=made)
        return type(
            cls.__name__,
            (cls,),
            {"subject": subject, "__test__": True, "__module__": cls.__module__},
        )
