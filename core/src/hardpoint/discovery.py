"""Discovery: find what is installed, judge it, load one of it. Functions over frozen values.

Finding reads metadata only: no plugin is imported, nothing is written, nothing is cached between
calls, so that a package installed a moment ago is seen. Loading imports one plugin's light module
and asks who it is; the contract number is checked before any other hook. The registry holds what
these functions return.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import pluggy
from attrs import evolve

import hardpoint
from hardpoint import hookspecs
from hardpoint.errors import HardpointError, IncompatiblePluginError
from hardpoint.isolation import place_of, prints_diverted, text_of
from hardpoint.metadata import GROUPS, Plugin, ResolvedPlugin, find, normalized
from hardpoint.records import ExecutorRecord, ExtensionRecord, PlatformRecord
from hardpoint.references import UnresolvedReferenceError

__all__ = [
    "GROUPS",
    "Plugin",
    "ResolvedPlugin",
    "check_api",
    "check_requirement",
    "failed",
    "find",
    "judge",
    "load",
    "normalized",
]

_RECORDS: Mapping[str, type] = MappingProxyType(
    {"platform": PlatformRecord, "executor": ExecutorRecord, "extension": ExtensionRecord}
)


def judge(
    found: Iterable[Plugin],
    *,
    disable: Iterable[str] = (),
    provider: Mapping[str, str] | None = None,
) -> tuple[Plugin, ...]:
    """Return the plugins as found, disabled, or in conflict with another one.

    ``disable`` are names, ``provider`` maps a name to the distribution that shall provide it. Both
    were checked by the caller.
    """
    disabled, chosen = set(disable), dict(provider or {})
    plugins = list(found)
    claims: dict[tuple[str, str], list[Plugin]] = {}
    for plugin in plugins:
        claims.setdefault((plugin.kind, plugin.name), []).append(plugin)
    return tuple(
        _judged(plugin, claims[plugin.kind, plugin.name], disabled, chosen) for plugin in plugins
    )


def check_requirement(plugin: Plugin) -> None:
    """Refuse, before anything is imported, a distribution that requires another core.

    Raises IncompatiblePluginError with both versions.
    """
    own = re.compile(r"hardpoint(?![\w.-])", re.IGNORECASE)
    wanted = [line for line in plugin.requires if own.match(line)]
    if not wanted:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for line in wanted:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            first = str(error).partition("\n")[0]  # more lines draw an arrow below the place
            raise IncompatiblePluginError(
                f"{plugin.label} cannot be judged: its metadata says Requires-Dist: {line!r}: "
                f"{first}. Reinstall {plugin.distribution}"
            ) from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(hardpoint.__version__, prereleases=True):
            raise IncompatiblePluginError(
                f"{plugin.label} requires hardpoint{requirement.specifier}, but this is hardpoint "
                f"{hardpoint.__version__}. {_way_out(plugin)}"
            )


def check_api(plugin: Plugin, record: Any) -> None:
    """Refuse a plugin that was built for a contract number that this core does not serve.

    A core with major N serves plugins for N (up to its own minor number) and for N-1. Raises
    IncompatiblePluginError with both numbers, TypeError for something that is no number.
    """
    api = record.api
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise TypeError(f"record.api is {api!r}; it must be a pair of whole numbers such as (2, 0)")
    core = hardpoint.API
    served = api[0] == core[0] - 1 or (api[0] == core[0] and api[1] <= core[1])
    if not served:
        newer = api > core
        way_out = (
            f"Install a newer hardpoint, or a {plugin.distribution} built for API {core[0]}"
            if newer
            else f"Install a {plugin.distribution} built for API {core[0]}, or an older hardpoint"
        )
        raise IncompatiblePluginError(
            f"{plugin.label} was built for {'a newer' if newer else 'an older'} contract: plugin "
            f"API {api[0]}.{api[1]}, core API {core[0]}.{core[1]} (hardpoint "
            f"{hardpoint.__version__}). {way_out}"
        )


def load(plugin: Plugin) -> Plugin:
    """Import the plugin's light module and ask who it is; return the plugin as it is then.

    Never raises but for KeyboardInterrupt: what went wrong is in ``state``, ``reason`` and
    ``error``. The order is the contract: Requires-Dist, import, ``record.api``; other hooks come
    later, in the registry.
    """
    try:
        check_requirement(plugin)
        with prints_diverted():
            module = _import(plugin.entry_point)
            record = _identity(plugin, module)
        check_api(plugin, record)
        _check_record(plugin, record)
    except IncompatiblePluginError as error:
        return evolve(plugin, state="refused", reason=str(error), error=error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - kept with the plugin
        return failed(plugin, error)
    return evolve(plugin, state="loaded", record=record, module=module)


def failed(plugin: Plugin, error: BaseException, where: str = "") -> Plugin:
    """Return the plugin as one that raised ``error``, in the hook or method ``where``.

    Of a reference that could not be resolved, what a module raised is kept as the error.
    """
    told = isinstance(error, HardpointError)
    text = text_of(error)
    reason = text if told else f"{type(error).__name__}: {text or 'no message'}{place_of(error)}"
    if isinstance(error, UnresolvedReferenceError) and error.__cause__ is not None:
        error = error.__cause__
    reason = f"{where} raised {reason}" if where else reason
    return evolve(plugin, state="failed", reason=reason, error=error)


def _judged(
    plugin: Plugin, claims: Sequence[Plugin], disabled: set[str], chosen: Mapping[str, str]
) -> Plugin:
    if plugin.kind != "command" and plugin.name in disabled:
        return evolve(plugin, state="disabled", reason="named in plugins.disable")
    if len(claims) == 1:
        return plugin
    if (choice := chosen.get(plugin.name)) is not None:
        own = [each for each in claims if normalized(each.distribution) == normalized(choice)]
        if plugin not in own:
            reason = f"plugins.provider.{plugin.name} names {choice}"
            return evolve(plugin, state="disabled", reason=reason)
        if len(own) == 1:
            return plugin
    others = " and ".join(f"{each.provider} ({each.entry_point})" for each in claims)
    return evolve(
        plugin,
        state="conflict",
        reason=f"{plugin.kind} {plugin.name!r} is claimed by {others}. Uninstall one, or set "
        f"plugins.provider.{plugin.name} to the distribution that shall provide it",
    )


def _import(value: str) -> Any:
    module_name, _, attributes = value.partition(":")
    module_name = module_name.strip()
    if not module_name:
        raise ImportError(f"entry point value {value!r} names no module")
    found: Any = importlib.import_module(module_name)
    for attribute in filter(None, attributes.strip().split(".")):
        found = getattr(found, attribute)
    return found


def _identity(plugin: Plugin, module: Any) -> Any:
    """Call the plugin's own identity hook, alone: no other hook of it is looked at."""
    if isinstance(module, type):
        raise TypeError(
            f"entry point value {plugin.entry_point!r} leads to a class, of which nobody makes an "
            f"instance; name its module, {module.__module__!r}, or an instance"
        )
    hook = f"hardpoint_{plugin.kind}"
    specification: Callable[..., Any] = getattr(hookspecs, hook)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(type("Identity", (), {hook: staticmethod(specification)}))
    manager.register(module)
    record = getattr(manager.hook, hook)()
    if not isinstance(record, _RECORDS[plugin.kind]):
        expected = _RECORDS[plugin.kind].__name__
        what = "nothing" if record is None else repr(record)
        place = "" if isinstance(module, ModuleType) else f", which is {_kind_of(module)},"
        raise TypeError(
            f"{hook} must be implemented in {plugin.entry_point!r}{place} with @hookimpl and "
            f"return {expected}; it gave {what}"
        )
    return record


def _kind_of(found: object) -> str:
    """Return what an entry point led to, for whoever meant it to lead to a module."""
    if isinstance(found, FunctionType):
        return f"a function (name its module, {found.__module__!r}, instead)"
    return f"an object of {type(found).__name__}"


def _check_record(plugin: Plugin, record: Any) -> None:
    if record.name != plugin.name:
        raise ValueError(
            f"the record is named {record.name!r}, the entry point {plugin.name!r}; they must agree"
        )


def _way_out(plugin: Plugin) -> str:
    return f"Install a {plugin.distribution} and a hardpoint that go together"
