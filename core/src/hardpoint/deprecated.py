"""Deprecation: one warning at the line of whoever uses the old thing, with what replaces it and the
contract number that removes it. An architecture test fails when that number has come.

Implementers of an old hook, or of an old argument of one, are warned at their own line by pluggy,
to which the specification gives :attr:`Deprecation.warning` (``warn_on_impl``,
``warn_on_impl_args``).

Whether a line was warned about already is remembered where Python itself remembers it: in the
``__warningregistry__`` of the module that holds the line. Nothing is kept here.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from attrs import frozen

from hardpoint.records import Version


class HardpointDeprecationWarning(DeprecationWarning):
    """Something of Hardpoint's contracts that a coming version removes is still in use."""


@frozen(kw_only=True)
class Deprecation:
    """What is deprecated, what to use instead, the contract number that deprecated it (``(2, 1)``)
    and the one that removes it (``(4, 0)``).

    The numbers are those of the package that warns (``hardpoint.API``, say). As N serves plugins
    built for N-1, what was deprecated within N is removed by N+2 at the earliest: N+1 still serves
    whoever was built for N. Raises ValueError for an earlier removal.
    """

    what: str
    instead: str
    since: Version
    removal: Version

    def __attrs_post_init__(self) -> None:
        if self.removal[0] < self.since[0] + 2:
            raise ValueError(
                f"{self.what}: deprecated in {_number(self.since)}, removed in "
                f"{_number(self.removal)}: {self.since[0] + 1} still serves plugins built for "
                f"{self.since[0]}. Remove it in {self.since[0] + 2}.0"
            )

    def expired(self, api: Version) -> bool:
        """Whether a package whose contract number is ``api`` should no longer have it."""
        return api >= self.removal

    @property
    def warning(self) -> HardpointDeprecationWarning:
        """The warning that says so."""
        return HardpointDeprecationWarning(
            f"{self.what} is deprecated since API {_number(self.since)} and goes with API "
            f"{_number(self.removal)}; use {self.instead} instead"
        )


def warn_caller(deprecation: Deprecation, *, package: str = "hardpoint") -> None:
    """Warn at the line that called into ``package``: the nearest frame outside it.

    Called by the deprecated function itself, in whichever process; how deep inside the package does
    not matter.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what warnings itself uses
    while frame is not None and _is_within(frame, package) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return
    module = frame.f_globals
    warnings.warn_explicit(
        deprecation.warning,
        category=HardpointDeprecationWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=module.get("__name__"),
        registry=module.setdefault("__warningregistry__", {}),
    )


def _is_within(frame: FrameType, package: str) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(f"{package}.")


def _number(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
