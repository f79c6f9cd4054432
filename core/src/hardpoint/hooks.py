"""The hook table: which functions of which plugins are called for a hook, and in which order.

Built on pluggy, which checks signatures; held by the Registry only. A plugin is registered when it
was loaded, and counts when it is in use: a platform that was merely a candidate is never asked.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pluggy

from hardpoint import hookspecs
from hardpoint.discovery import GROUPS
from hardpoint.errors import PluginError
from hardpoint.isolation import log_error, prints_diverted
from hardpoint.suggestions import did_you_mean

_logger = logging.getLogger("hardpoint.registry")

Key = tuple[str, str]
"""A plugin's kind and name."""


class HookTable:
    """Registers plugin modules and answers who implements what."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._names = [name for name in vars(hookspecs) if name.startswith("hardpoint_")]
        self._registered: dict[Key, str] = {}
        self._in_use: list[Key] = []
        self._listeners: dict[str, tuple[tuple[Key, pluggy.HookImpl], ...]] = {}
        self._complained: set[tuple[Key, str]] = set()

    def register(self, key: Key, module: Any) -> None:
        """Check and add the hooks of a loaded plugin. One module may serve several plugins.

        Raises PluginError for a misspelt hook, an unmarked one, or an unknown argument; nothing of
        the plugin is left then.
        """
        known = self._manager.get_name(module)
        if known is not None:
            self._registered[key] = known
            return
        self._check_names(module)
        name = f"{key[0]}:{key[1]}"
        try:
            self._manager.register(module, name)
        except pluggy.PluginValidationError as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            raise PluginError(f"a hook has the wrong arguments: {error}") from error
        self._registered[key] = name

    def use(self, key: Key) -> None:
        """Let the hooks of a registered plugin count."""
        if key not in self._in_use:
            kinds = list(GROUPS)
            self._in_use = sorted([*self._in_use, key], key=lambda each: kinds.index(each[0]))
            self._listeners = {}

    def drop(self, key: Key) -> None:
        """Let the hooks of a plugin count no longer."""
        self._in_use = [each for each in self._in_use if each != key]
        self._listeners = {}

    def in_use(self) -> tuple[Key, ...]:
        """Return the plugins whose hooks count: platform, executor, extensions, in this order."""
        return tuple(self._in_use)

    def implemented(self, key: Key) -> tuple[str, ...]:
        """Return the hooks that a registered plugin implements."""
        return tuple(hook for hook in self._names if self._implementation(key, hook) is not None)

    def implementers(self, hook: str) -> tuple[Key, ...]:
        """Return the plugins in use that implement ``hook``, in the order in which they are called.

        A module that serves several plugins counts once, for the first of them.
        """
        return tuple(key for key, _ in self._listening(hook))

    def call(self, key: Key, hook: str, arguments: Mapping[str, Any]) -> Any:
        """Call one plugin's implementation and return its answer; None if it has none."""
        implementation = self._implementation(key, hook)
        if implementation is None:
            return None
        with prints_diverted():
            return _call(implementation, arguments)

    def answers(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
        """Yield each plugin in use that implements ``hook`` with its answer, one call at a time."""
        for key, implementation in self._listening(hook):
            yield key, _call(implementation, arguments)

    def announce(self, hook: str, arguments: Mapping[str, Any]) -> None:
        """Tell the plugins in use. One that raises is logged once for each hook, the others hear
        it all the same.
        """
        for key, implementation in self._listening(hook):
            try:
                _call(implementation, arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - isolated, be it SystemExit
                if (key, hook) not in self._complained:
                    self._complained.add((key, hook))
                    log_error(_logger, f"{key[0]} {key[1]!r} raised in {hook}; said once", error)

    def _listening(self, hook: str) -> tuple[tuple[Key, pluggy.HookImpl], ...]:
        """Return who is called for ``hook``; computed once between changes."""
        listeners = self._listeners.get(hook)
        if listeners is None:
            found: dict[str, tuple[Key, pluggy.HookImpl]] = {}
            for key in self._in_use:
                implementation = self._implementation(key, hook)
                if implementation is not None:
                    found.setdefault(self._registered[key], (key, implementation))
            listeners = self._listeners[hook] = tuple(found.values())
        return listeners

    def _implementation(self, key: Key, hook: str) -> pluggy.HookImpl | None:
        caller = getattr(self._manager.hook, hook)
        name = self._registered[key]
        return next((each for each in caller.get_hookimpls() if each.plugin_name == name), None)

    def _check_names(self, module: Any) -> None:
        for name in dir(module):
            options = self._manager.parse_hookimpl_opts(module, name)
            if name in self._names:
                if options is not None:
                    _check_arguments(name, getattr(module, name))
                elif inspect.isfunction(getattr(module, name)):
                    raise PluginError(f"function {name!r} is named like a hook but lacks @hookimpl")
            elif options is not None and not options["optionalhook"]:
                hint = did_you_mean(name, self._names)
                raise PluginError(
                    f"there is no hook {name!r}{f'. {hint}' if hint else '.'} One of a newer API "
                    "is marked with @hookimpl(optionalhook=True)"
                )


def _check_arguments(hook: str, function: Callable[..., object]) -> None:
    """Raise PluginError for an argument that the hook does not have; one with a default is the
    implementation's own and never given.
    """
    known = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in known and name != "self" and parameter.default is parameter.empty:
            hint = did_you_mean(name, known)
            raise PluginError(
                f"hook {hook!r} has no argument {name!r}{f'. {hint}' if hint else '.'} It has "
                f"{', '.join(known) or 'none'}, of which an implementation may take fewer"
            )


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*[arguments[name] for name in implementation.argnames])
