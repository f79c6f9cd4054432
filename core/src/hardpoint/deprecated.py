"""Deprecation: one warning at the line of whoever uses or implements the old thing, with what
replaces it and the version that removes it.

Whether a line was warned about already is remembered where Python itself remembers it: in the
``__warningregistry__`` of the module that holds the line. Nothing is kept here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

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
    if frame is not None:
        _warn(deprecation, frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def warn_implementer(deprecation: Deprecation, function: Callable[..., Any]) -> None:
    """Warn at the line where a plugin defines ``function``, which implements the old thing.

    Called by the registry when a plugin is registered. Decorated functions and methods are looked
    through; what has no Python code is warned about at this function's caller.
    """
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    if code is None:
        warnings.warn(deprecation.warning, stacklevel=2)
        return
    _warn(deprecation, code.co_filename, code.co_firstlineno, function.__globals__)


def _is_within(frame: FrameType, package: str) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(f"{package}.")


def _warn(deprecation: Deprecation, file: str, line: int, module: dict[str, Any]) -> None:
    warnings.warn_explicit(
        deprecation.warning,
        category=HardpointDeprecationWarning,
        filename=file,
        lineno=line,
        module=module.get("__name__"),
        registry=module.setdefault("__warningregistry__", {}),
    )
