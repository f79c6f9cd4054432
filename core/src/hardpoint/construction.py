"""From a loaded plugin's record to its objects: settings, platform, verdict. Pure functions.

Called by the Registry, which keeps what they return and isolates what they raise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from attrs import NOTHING, fields, has

from hardpoint.capabilities import SINCE, Capability
from hardpoint.discovery import Plugin
from hardpoint.errors import ConfigError
from hardpoint.isolation import ended_within, prints_diverted
from hardpoint.records import Problem, Verdict
from hardpoint.references import resolve, resolve_class

if TYPE_CHECKING:
    from hardpoint.platform import Platform


_logger = logging.getLogger("hardpoint.registry")

PROBE_SECONDS = 0.2
"""How long a probe may take; a longer one is logged."""

LONGEST_PROBE_SECONDS = 1.0
"""How long a probe is waited for."""

_OF_A_PLATFORM = ("name", "worker_class", "model_runner_class", "capabilities")
"""What :class:`hardpoint.platform.Platform` leaves to its subclasses beside the methods."""


def build_settings(plugin: Plugin, raw: Any, origins: Mapping[str, str]) -> object | None:
    """Return the plugin's settings as an instance of the class its record declares, or None.

    Raises ConfigError for keys that it does not have (``plugins.NAME.KEY``).
    """
    reference = plugin.record.settings
    if reference is None:
        if raw and isinstance(raw, Mapping):
            raise _without_settings(plugin, raw, origins)
        return None
    settings_class = resolve(reference)
    if not raw and has(settings_class) and _has_defaults(settings_class):
        return cast("object", settings_class())  # spares a listing the import of a converter
    from hardpoint.settings import structure_settings

    return cast("object", structure_settings(settings_class, raw, plugin.name, origins))


def build_platform(plugin: Plugin, settings: object | None) -> Platform:
    """Construct the platform of a loaded plugin.

    Raises whatever its module raises, and TypeError or ValueError for a class of the wrong shape.
    """
    with prints_diverted():
        return _built_platform(plugin, settings)


def _built_platform(plugin: Plugin, settings: object | None) -> Platform:
    from hardpoint.platform import Platform

    reference = plugin.record.platform
    platform_class = resolve_class(reference, Platform)
    absent = [name for name in _OF_A_PLATFORM if not hasattr(platform_class, name)]
    if absent:
        raise TypeError(f"{reference} lacks {', '.join(absent)}; a platform declares each")
    name = platform_class.name
    if name != plugin.name:
        raise ValueError(
            f"{reference} has the name {name!r}, its entry point {plugin.name!r}; they must agree"
        )
    declared = platform_class.capabilities
    if not isinstance(declared, Mapping):
        raise TypeError(f"{reference} has {declared!r} as its capabilities, not a mapping")
    missing = [
        capability.name
        for capability in Capability
        if SINCE[capability] <= plugin.record.api and capability not in declared
    ]
    if missing:
        raise ValueError(
            f"{reference} declares nothing for {', '.join(missing)}; each capability needs YES, "
            "NOT_YET or NEVER"
        )
    return cast("Platform", platform_class(settings))


def build_verdict(plugin: Plugin, platform: Platform | None) -> Verdict:
    """Ask the probe of a platform, or of an executor, where ``platform`` is None.

    The probe runs on a thread of its own: one that does not end in time is left behind, and its
    verdict is unavailable. Raises whatever the probe raises, and TypeError for what is no Verdict.
    """
    probe = plugin.record.probe if platform is None else platform.probe
    if probe is None:
        return Verdict(available=True, reason="needs nothing but its distribution")
    started = time.perf_counter()
    with prints_diverted():
        ended = ended_within(LONGEST_PROBE_SECONDS, probe)
    seconds = time.perf_counter() - started
    if seconds > PROBE_SECONDS:
        _logger.warning("the probe of %s took %.1f s", plugin.label, seconds)
    if ended is None:
        late = f"its probe did not end within {LONGEST_PROBE_SECONDS:g} s"
        return Verdict(available=False, reason=late)
    verdict = ended.result()
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the probe returned {verdict!r}, which is not a Verdict")
    if type(verdict.priority) is not int:
        raise TypeError(
            f"the probe returned priority {verdict.priority!r}; it must be a whole number"
        )
    return verdict


def _has_defaults(settings_class: Any) -> bool:
    return all(field.default is not NOTHING for field in fields(settings_class))


def _without_settings(plugin: Plugin, raw: Any, origins: Mapping[str, str]) -> ConfigError:
    key = f"plugins.{plugin.name}"
    origin = next((who for path, who in origins.items() if path.startswith(f"{key}.")), "")
    message = f"{plugin.kind} {plugin.name!r} ({plugin.provider}) has no settings."
    problem = Problem(key=key, value=raw, message=message, way_out="Remove them.", origin=origin)
    return ConfigError(str(problem), problems=(problem,))
