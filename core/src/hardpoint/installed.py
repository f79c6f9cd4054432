"""The installed plugins of one engine and what became of each: found, loaded, set aside.

Held by the Registry only. Loading happens once; what a plugin raised is kept and raised again, the
same object, each time that the plugin is asked for by name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from attrs import evolve

from hardpoint import discovery, suggestions
from hardpoint.discovery import Plugin, ResolvedPlugin
from hardpoint.errors import (
    HardpointError,
    IncompatiblePluginError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
)
from hardpoint.hooks import HookTable

_logger = logging.getLogger("hardpoint.registry")


class Installed:
    """Every plugin found, in its present state, and the hooks of the loaded ones. Thread-safe.

    With ``strict`` a plugin that fails is an error where it would be set aside otherwise.
    """

    def __init__(self, plugins: Sequence[Plugin], *, strict: bool = False) -> None:
        self.hooks = HookTable()
        self.lock = threading.RLock()
        self._plugins = list(plugins)
        self._strict = strict
        self._warned: set[tuple[str, str]] = set()

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """All of them, in the order of discovery."""
        return tuple(self._plugins)

    def find(self, kind: str, name: str) -> Plugin:
        """Return the plugin of that name; of several that claim it, the one not disabled.

        Raises PluginNotFoundError with close matches.
        """
        claims = [p for p in self._plugins if p.kind == kind and p.name == name]
        if not claims:
            raise suggestions.not_found(kind, name, self._plugins)
        return next((p for p in claims if p.state != "disabled"), claims[0])

    def load(self, kind: str, name: str) -> Plugin:
        """Load a plugin that was asked for by name; raise if it cannot be used."""
        with self.lock:
            plugin = self._loaded(kind, name)
        if plugin.state != "loaded":
            raise complaint(plugin)
        return plugin

    def attempt(self, kind: str, name: str) -> Plugin:
        """Load a plugin that nobody asked for by name; set it aside if it cannot be used."""
        with self.lock:
            plugin = self._loaded(kind, name)
            self.set_aside(plugin)
        return plugin

    def use(self, kind: str, name: str) -> Plugin:
        """Load a plugin by name and let its hooks count."""
        with self.lock:
            plugin = self.load(kind, name)
            self.hooks.use((kind, name))
        return plugin

    def fail(self, kind: str, name: str, error: BaseException, where: str = "") -> Plugin:
        """Note that a loaded plugin raised ``error`` in ``where``; the first error stays."""
        with self.lock:
            plugin = self.find(kind, name)
            if plugin.state == "loaded":
                plugin = discovery.failed(plugin, error, where)
                self._store(plugin)
                self.hooks.drop((kind, name))
        return plugin

    def set_aside(self, plugin: Plugin) -> None:
        """Warn once of a plugin that cannot be used and that nobody asked for by name; with
        ``strict``, and for a conflict, raise.
        """
        if plugin.state in ("loaded", "disabled"):
            return
        if self._strict or plugin.state == "conflict":
            raise complaint(plugin)
        key = (plugin.kind, plugin.name)
        if key not in self._warned:
            self._warned.add(key)
            _logger.warning(
                "%s is set aside: %s. HARDPOINT_DISABLE=%s silences this.",
                plugin.label,
                plugin.reason.rstrip("."),
                plugin.name,
            )

    def _loaded(self, kind: str, name: str) -> Plugin:
        plugin = self.find(kind, name)
        if plugin.state != "found":
            return plugin
        plugin = discovery.load(plugin)
        if plugin.state == "loaded":
            try:
                self.hooks.register((kind, name), plugin.module)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - its module may be any object
                plugin = discovery.failed(plugin, error)
        self._store(plugin)
        return plugin

    def _store(self, plugin: Plugin) -> None:
        self._plugins = [plugin if p.resolved == plugin.resolved else p for p in self._plugins]


def complaint(plugin: Plugin) -> HardpointError:
    """Return the error for a plugin that was asked for and cannot be used.

    Its ``__cause__`` is what the plugin raised, the same object each time.
    """
    if plugin.state == "disabled":
        return PluginError(f"{plugin.label} was asked for, but is disabled: {plugin.reason}")
    if plugin.state == "conflict":
        return PluginConflictError(plugin.reason)
    if isinstance(plugin.error, IncompatiblePluginError):
        return plugin.error.with_traceback(None)
    error = PluginLoadError(f"{plugin.label} cannot be used: {plugin.reason}")
    error.__cause__ = plugin.error
    return error


def same_as(wanted: ResolvedPlugin, here: Sequence[Plugin]) -> Plugin:
    """Return this process's own plugin that equals the driver's, to be loaded.

    Raises IncompatiblePluginError if it is absent here or differs in version or entry point.
    """
    named = [p for p in here if (p.kind, p.name) == (wanted.kind, wanted.name)]
    for plugin in named:
        if plugin.resolved == wanted:
            return evolve(plugin, state="found", reason="")
    found = " and ".join(f"{p.provider} ({p.entry_point})" for p in named) or "nothing"
    raise IncompatiblePluginError(
        f"{wanted.kind} {wanted.name!r}: the driver runs {wanted.distribution} {wanted.version} "
        f"({wanted.entry_point}), but this process finds {found}. Install the same version "
        "wherever workers run"
    )
