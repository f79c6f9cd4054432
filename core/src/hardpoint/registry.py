"""The Registry: the plugins of one engine, and the hooks of those in use.

A value, not a global: two engines in one process have two. The driver discovers; each worker builds
one from the driver's resolved list. A plugin is loaded when it is asked for: one named by the
configuration raises what it raised, the same original exception each time; another one that fails
is set aside with one warning and stays in :attr:`Registry.plugins`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from hardpoint import discovery, suggestions
from hardpoint.config.problems import config_error
from hardpoint.construction import build_platform, build_settings, build_verdict
from hardpoint.discovery import Plugin, ResolvedPlugin
from hardpoint.errors import ConfigError, HardpointError, PluginConflictError, PluginError
from hardpoint.installed import Installed, complaint, same_as
from hardpoint.offers import chosen_offers
from hardpoint.records import Change, Offer, Verdict
from hardpoint.references import resolve_class

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform

_logger = logging.getLogger("hardpoint.registry")
_R = TypeVar("_R")


class Registry:
    """Holds what discovery found; loads on demand; asks and tells the plugins in use.

    In use are the selected platform, the selected executor and the enabled extensions: only their
    hooks count. Built by :meth:`discover` in the driver, by :meth:`from_resolved` in workers.
    Thread-safe.
    """

    def __init__(self, plugins: Sequence[Plugin], config: Config | None = None) -> None:
        section = None if config is None else config.plugins
        self._installed = Installed(plugins, strict=section is not None and section.strict)
        self._raw_settings = {} if section is None else section.settings
        self._origins: Mapping[str, str] = {} if config is None else config.origins
        self._hooks = self._installed.hooks
        self._lock = self._installed.lock
        self._platforms: dict[str, Platform] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._settings: dict[tuple[str, str], object | None] = {}
        self._extensions_loaded = False

    @classmethod
    def discover(
        cls,
        config: Config | None = None,
        *,
        path: Sequence[str] | None = None,
        diagnosis: bool = False,
    ) -> Self:
        """Find what is installed on ``path`` (default ``sys.path``); import none of it.

        Called in the driver. Raises ConfigError for every name under ``plugins`` in the
        configuration that no plugin has; for a ``diagnosis``, which must go on, each is a warning.
        """
        found = discovery.find(path)
        if config is None:
            return cls(discovery.judge(found))
        plugins = discovery.judge(
            found, disable=config.plugins.disable, provider=config.plugins.provider
        )
        problems = suggestions.unknown_names(config, plugins)
        if problems and not diagnosis:
            raise config_error(problems)
        for problem in problems:
            _logger.warning("a run would end with: %s", problem)
        return cls(plugins, config)

    @classmethod
    def from_resolved(
        cls,
        resolved: Sequence[ResolvedPlugin],
        config: Config | None = None,
        *,
        path: Sequence[str] | None = None,
    ) -> Self:
        """Load exactly the driver's plugins and put them in use. Called in workers, once.

        ``config`` is the driver's, its settings structured or raw. Raises IncompatiblePluginError
        if a plugin is absent here or has another version, and as :meth:`load`.
        """
        here = discovery.judge(discovery.find(path))
        registry = cls([same_as(each, here) for each in resolved], config)
        registry._extensions_loaded = True
        for each in resolved:
            registry.use(each.kind, each.name)
        return registry

    # What is there.

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin found, in its present state."""
        return self._installed.plugins

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of one kind that are not disabled."""
        names = (p.name for p in self.plugins if p.kind == kind and p.state != "disabled")
        return tuple(dict.fromkeys(names))

    def has(self, kind: str, name: str) -> bool:
        """Whether a plugin of that kind and name was found, in any state."""
        return any(p.kind == kind and p.name == name for p in self.plugins)

    def resolved(self) -> list[ResolvedPlugin]:
        """Return the plugins in use, for every worker to load exactly these."""
        self.extensions()
        return [self._installed.find(*key).resolved for key in self._hooks.in_use()]

    # Loading.

    def load(self, kind: str, name: str) -> Plugin:
        """Load one plugin, asked for by name.

        Raises PluginNotFoundError, PluginConflictError, IncompatiblePluginError, PluginError if it
        is disabled, and PluginLoadError whose ``__cause__`` is the plugin's original exception, the
        same object each time.
        """
        return self._installed.load(kind, name)

    def attempt(self, kind: str, name: str) -> Plugin:
        """Load one plugin that nobody asked for by name; one that fails is set aside with one
        warning (an error with ``plugins.strict``). A conflict is always an error.
        """
        return self._installed.attempt(kind, name)

    def use(self, kind: str, name: str) -> Plugin:
        """Load one plugin by name and let its hooks count from now on."""
        return self._installed.use(kind, name)

    def extensions(self) -> tuple[Plugin, ...]:
        """Return the extensions in use, loading the enabled ones at the first call."""
        if not self._extensions_loaded:
            with self._lock:
                for name in self.names("extension"):
                    if self._installed.attempt("extension", name).state == "loaded":
                        self._installed.use("extension", name)
                self._extensions_loaded = True
        return self.used("extension")

    def settings(self, kind: str, name: str) -> object | None:
        """Return a plugin's settings: an instance of the class that its record declares, or None.

        Raises ConfigError naming each wrong key (``plugins.NAME.KEY``), and as :meth:`load`.
        """
        with self._lock:
            if (kind, name) not in self._settings:
                plugin, raw = self.load(kind, name), self._raw_settings.get(name)
                self._settings[kind, name] = build_settings(plugin, raw, self._origins)
            return self._settings[kind, name]

    def platform(self, name: str) -> Platform:
        """Return the platform ``name``, constructed with its settings; one instance a registry.

        Raises as :meth:`load`, and ConfigError for settings that it does not accept.
        """
        with self._lock:
            if name not in self._platforms:
                plugin = self.load("platform", name)
                try:
                    settings = self.settings("platform", name)
                    self._platforms[name] = build_platform(plugin, settings)
                except (ConfigError, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - kept, raised
                    failure = complaint(self._installed.fail("platform", name, error))
                    raise failure from failure.__cause__
            return self._platforms[name]

    def executor(self, name: str) -> type[Executor]:
        """Return the class of the executor ``name``. Raises as :meth:`load`."""
        from hardpoint.executor import Executor

        plugin = self.load("executor", name)
        try:
            return resolve_class(plugin.record.executor, Executor)
        except PluginError as error:
            failure = complaint(self._installed.fail("executor", name, error))
            raise failure from failure.__cause__

    def verdict(self, kind: str, name: str, *, named: bool = False) -> Verdict:
        """Return the probe's verdict on a platform or an executor, probing once a registry.

        A plugin that fails is set aside with one warning (an error with ``plugins.strict``): its
        verdict is unavailable and says why. With ``named`` (the configuration asks for it) it
        raises as :meth:`load` instead. Raises PluginConflictError, and ConfigError for wrong
        settings.
        """
        with self._lock:
            if named:
                self.load(kind, name)
                if kind == "platform":
                    self.platform(name)
            if (kind, name) not in self._verdicts:
                self._verdicts[kind, name] = self._probe(kind, name, named)
            if named:
                self.load(kind, name)
            return self._verdicts[kind, name]

    # Hooks of the plugins in use.

    def configure(self, config: Config, platform: Platform) -> tuple[tuple[str, Change], ...]:
        """Return (plugin's name, change of ``config``) for each change that a plugin in use wants.

        Called by :mod:`hardpoint.config.resolution` in the driver.
        """
        self._installed.use("platform", platform.name)
        changes = self._records("hardpoint_configure", Change, {"config": config})
        return tuple((plugin.name, change) for plugin, change in changes)

    def worker_class(self, config: Config, platform: Platform) -> str:
        """Return the reference of the Worker class: that of the extension which ``config.worker``
        names, else the platform's own. Called in the driver.
        """
        return self._class_reference("worker", config.worker, config, platform)

    def model_runner_class(self, config: Config, platform: Platform) -> str:
        """Return the reference of the ModelRunner class: that of the extension which
        ``config.model_runner`` names, else the platform's own. Called in the driver.
        """
        return self._class_reference("model_runner", config.model_runner, config, platform)

    def worker_env(self, config: Config, rank: int) -> dict[str, str]:
        """Return the variables that the plugins in use want for the worker of ``rank``.

        Called by executors in the driver. Raises PluginConflictError if two want different values.
        """
        wanted: dict[str, tuple[Plugin, str]] = {}
        arguments = {"config": config, "rank": rank}
        for plugin, name, value in self._items("hardpoint_worker_env", arguments):
            rival, other = wanted.setdefault(name, (plugin, value))
            if other != value:
                raise PluginConflictError(
                    f"{rival.label} sets {name}={other!r} for workers and {plugin.label} sets it "
                    f"to {value!r}. Name one of them in plugins.disable"
                )
        return {name: value for name, (_, value) in wanted.items()}

    def worker_methods(self) -> dict[str, Callable[..., object]]:
        """Return name -> function(worker, ...) of the methods that plugins add to workers.

        Called in the worker. Raises PluginConflictError for a name that two plugins offer.
        """
        methods: dict[str, tuple[Plugin, Callable[..., object]]] = {}
        for plugin, name, function in self._items("hardpoint_worker_methods", {}):
            if name in methods:
                raise PluginConflictError(
                    f"worker method {name!r} is offered by {methods[name][0].label} and by "
                    f"{plugin.label}. Name one of them in plugins.disable"
                )
            methods[name] = (plugin, function)
        return {name: function for name, (_, function) in methods.items()}

    def offers(
        self, hook: str, platform_name: str, description: Mapping[str, object] | None = None
    ) -> dict[str, Offer]:
        """Return name -> the winning offer of an offering hook; the caller has the built-in ones.

        With ``description``, operations that do not support it are passed over. Raises
        PluginConflictError for a tie.
        """
        return chosen_offers(hook, platform_name, self.candidates(hook), description)

    def candidates(self, hook: str) -> list[tuple[Plugin, Offer]]:
        """Return every offer of the plugins in use, for whichever platform, with its plugin."""
        return list(self._records(hook, Offer, {}))

    def announce(self, hook: str, **arguments: Any) -> None:
        """Tell the plugins in use. Never raises what a plugin raises; costs a look-up when nobody
        listens.
        """
        if not self._extensions_loaded:
            self.extensions()
        self._hooks.announce(hook, arguments)

    def used(self, kind: str) -> tuple[Plugin, ...]:
        """Return the plugins of one kind that are in use."""
        return tuple(self._installed.find(*key) for key in self._hooks.in_use() if key[0] == kind)

    def implementers(self, hook: str) -> tuple[str, ...]:
        """Return the names of the plugins in use that implement ``hook``, in calling order."""
        self.extensions()
        return tuple(name for _, name in self._hooks.implementers(hook))

    def implemented(self, plugin: Plugin) -> tuple[str, ...]:
        """Return the hooks that a plugin implements; none unless it is loaded."""
        loaded = plugin.state == "loaded"
        return self._hooks.implemented((plugin.kind, plugin.name)) if loaded else ()

    # Within.

    def _probe(self, kind: str, name: str, named: bool) -> Verdict:
        plugin = self._installed.attempt(kind, name)
        if plugin.state == "loaded":
            try:
                platform = self.platform(name) if kind == "platform" else None
                return build_verdict(plugin, platform)
            except (ConfigError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - isolated, kept with it
                plugin = self._installed.fail(kind, name, error, "probe")
                if not named:
                    self._installed.set_aside(plugin)
        return Verdict(available=False, reason=f"{plugin.state}: {plugin.reason}")

    def _class_reference(
        self, what: str, extension: str | None, config: Config, platform: Platform
    ) -> str:
        key = ("platform", platform.name) if extension is None else ("extension", extension)
        plugin = self._installed.use(*key)
        arguments = {"config": config, "platform": platform}
        hook = f"hardpoint_{what}"
        try:
            answer = self._hooks.call(key, hook, arguments)
        except (HardpointError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - kept with the plugin, raised
            self._refuse(plugin, hook, error)
        if answer is None and extension is None:
            answer = getattr(platform, f"{what}_class")
        if not isinstance(answer, str):
            raise PluginError(
                f"{plugin.label} gives {answer!r} as its {what} class; it must be a reference "
                "'module:Class'"
            )
        return answer

    def _items(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[tuple[Plugin, str, Any]]:
        """Yield (plugin, key, value) of the mappings that the plugins in use return."""
        for plugin, answer in self._answers(hook, arguments):
            if isinstance(answer, Mapping):
                yield from ((plugin, name, value) for name, value in answer.items())
            else:
                self._object(plugin, hook, TypeError(f"it returned {answer!r}, not a mapping"))

    def _records(
        self, hook: str, record: type[_R], arguments: Mapping[str, Any]
    ) -> Iterator[tuple[Plugin, _R]]:
        """Yield (plugin, record) of the lists that the plugins in use return."""
        for plugin, answer in self._answers(hook, arguments):
            records = answer if isinstance(answer, list | tuple) else [answer]
            wrong = [each for each in records if not isinstance(each, record)]
            if wrong:
                text = f"it returned {wrong[0]!r}, which is not of {record.__name__}"
                self._object(plugin, hook, TypeError(text))
            else:
                yield from ((plugin, each) for each in records)

    def _answers(self, hook: str, arguments: Mapping[str, Any]) -> Iterator[tuple[Plugin, Any]]:
        self.extensions()
        for key in self._hooks.implementers(hook):
            plugin = self._installed.find(*key)
            try:
                answer = self._hooks.call(key, hook, arguments)
            except (HardpointError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - isolated, and kept with the plugin
                self._object(plugin, hook, error)
            else:
                if answer is not None:
                    yield plugin, answer

    def _object(self, plugin: Plugin, hook: str, error: BaseException) -> None:
        """Set an extension aside that went wrong in a hook; raise for a plugin that was chosen, and
        for one that wants the process to end (SystemExit): to go on without it is not what it asks.
        """
        if plugin.kind != "extension" or not isinstance(error, Exception):
            self._refuse(plugin, hook, error)
        self._installed.set_aside(self._installed.fail(plugin.kind, plugin.name, error, hook))

    def _refuse(self, plugin: Plugin, hook: str, error: BaseException) -> NoReturn:
        failure = complaint(self._installed.fail(plugin.kind, plugin.name, error, hook))
        raise failure from failure.__cause__
