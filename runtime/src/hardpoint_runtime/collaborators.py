"""What a worker or model runner is made of: the results of its ``make_*`` methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hardpoint.errors import IncompatiblePluginError

_Made = TypeVar("_Made")
_Given = ParamSpec("_Given")


def made(make: Callable[_Given, _Made], *args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
    """Return what a ``make_*`` method makes. Raises IncompatiblePluginError if it forgot to return
    it, which would otherwise be noticed somewhere else and later.
    """
    collaborator = make(*args, **kwargs)
    if collaborator is None:
        raise IncompatiblePluginError(
            f"{make.__module__}.{make.__qualname__} returned None; it must return what it makes"
        )
    return collaborator
