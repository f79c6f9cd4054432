"""Deprecation: one warning at the line of whoever uses the old thing, with what replaces it and the
version that removes it.

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


class HardpointDeprecationWarning(DeprecationWarning):
    """Something of Hardpoint's contracts that a coming version removes is still in use."""


@frozen(kw_only=True)
class Deprecation:
    """What is deprecated, what to use instead, and the version that removes it (``"3.0"``)."""

    what: str
    instead: str
    removal: str

    @property
    def warning(self) -> HardpointDeprecationWarning:
        """The warning that says so."""
        return HardpointDeprecationWarning(
            f"{self.what} is deprecated and will be removed in version {self.removal}; "
            f"use {self.instead} instead"
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
