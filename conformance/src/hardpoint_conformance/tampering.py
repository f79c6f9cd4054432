"""Who changed the tests: what a plugin's own classes override, and which hooks could interfere."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from hardpoint_conformance.suite import Suite

if TYPE_CHECKING:
    import pytest

KIT = "hardpoint_conformance"
HOOKS = (
    "pytest_itemcollected", "pytest_collection_modifyitems", "pytest_pycollect_makeitem",
    "pytest_pyfunc_call", "pytest_runtest_protocol", "pytest_runtest_setup",
    "pytest_runtest_call", "pytest_runtest_makereport", "pytest_generate_tests",
)  # fmt: skip
"""Hooks by which somebody could keep a test from running or change what it is."""


def kit_class(suite: type[Suite]) -> type[Suite]:
    """Return the kit's own class that ``suite`` derives from."""
    return next(kind for kind in suite.__mro__ if _is_ours(kind))


def tests_of(suite: type[Suite]) -> frozenset[str]:
    """Return the names of the kit's tests in a suite."""
    own = inspect.getmembers(kit_class(suite), callable)
    return frozenset(name for name, _ in own if name.startswith("test_"))


def overridden(suite: type[Suite]) -> tuple[str, ...]:
    """Return ``Class.attribute`` for each attribute of the kit's class that a subclass redefines,
    and each that an instance of the kit's class was given from outside.
    """
    ours = kit_class(suite)
    known = set(dir(ours))
    found = []
    for kind in suite.__mro__[: suite.__mro__.index(ours)]:
        changed = {name for name in set(vars(kind)) & known if _counts(name)}
        found += [f"{kind.__name__}.{name}" for name in sorted(changed)]
    for name in sorted(tests_of(suite)):
        function = inspect.getattr_static(ours, name)
        if not _of_the_kit(function):
            found.append(f"{ours.__name__}.{name} (replaced from outside)")
        if [mark.name for mark in getattr(function, "pytestmark", ()) if mark.name in _ENDING]:
            found.append(f"{ours.__name__}.{name} (marked from outside)")
    return tuple(found)


_ENDING = ("skip", "skipif", "xfail")


def foreign_hooks(manager: pytest.PytestPluginManager) -> tuple[str, ...]:
    """Return ``plugin: hook`` for each hook implementation that is neither pytest's nor the kit's
    and could interfere.
    """
    found = []
    for hook in HOOKS:
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            module = getattr(implementation.function, "__module__", "") or ""
            if module.split(".")[0] not in (KIT, "_pytest", "pytest"):
                found.append(f"{implementation.plugin_name.rpartition('/')[2]}: {hook}")
    return tuple(sorted(found))


def _counts(name: str) -> bool:
    """Whether a subclass that has ``name`` changes what the tests do."""
    special = name.startswith("__") and name.endswith("__")
    return name != "subject" and (not special or name in _SPECIAL)


_SPECIAL = ("__init__", "__new__", "__getattribute__", "__getattr__", "__init_subclass__")


def _is_ours(kind: type) -> bool:
    return _of_the_kit(kind) and "subject" not in vars(kind)


def _of_the_kit(value: object) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == KIT
