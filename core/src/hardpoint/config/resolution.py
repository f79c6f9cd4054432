"""From what was asked for to what will run: plugins' changes, the platform's defaults, the checks.

Called by the engine in the driver, in this order, between reading the model's description and
starting workers. A value that the user set is never changed here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from hardpoint.capabilities import Capability, Support
from hardpoint.config.checks import config_problems
from hardpoint.config.keys import KEYS, find_key, get, is_plugin_key, replace
from hardpoint.config.problems import config_error, did_you_mean
from hardpoint.config.schema import Config
from hardpoint.errors import ConfigError, PluginConflictError, PluginError, PluginNotFoundError
from hardpoint.records import Problem
from hardpoint.settings import settings_leaves
from hardpoint.suggestions import did_you_mean as names_like

if TYPE_CHECKING:
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform
    from hardpoint.records import Change, Limits, Offer
    from hardpoint.registry import Registry

_logger = logging.getLogger("hardpoint.config")

CONSUMED = (
    "platform",
    "model",
    "load_format",
    "plugins.disable",
    "plugins.strict",
    "plugins.provider",
)
"""Keys that had their effect before plugins are asked for changes."""


def configure(config: Config, registry: Registry, platform: Platform) -> Config:
    """Return ``config`` with the changes that the selected platform and enabled extensions ask for.

    Called after ``config.description`` was read and before defaults are filled; logs each change.
    All are asked with the same configuration, in which the settings of plugins in use are
    structured (:func:`structure_plugins`). Raises PluginError naming the plugin for a change of
    what the user set, of a key that had its effect already, with a wrong ``old`` or an impossible
    ``new``; PluginConflictError where two plugins want one key otherwise.
    """
    config = structure_plugins(config, registry)
    owners: dict[str, tuple[str, Change]] = {}
    result = config
    for plugin, change in registry.configure(config, platform):
        _check_change(config, platform, plugin, change)
        rival, other = owners.setdefault(change.key, (plugin, change))
        if other.new != change.new:
            raise PluginConflictError(
                f"plugin {rival!r} sets {change.key} = {other.new!r} ({other.reason}) and plugin "
                f"{plugin!r} sets it to {change.new!r} ({change.reason}). Set {change.key} "
                "yourself, or name one of them in plugins.disable."
            )
        result = _apply(result, plugin, change)
    return result


def structure_plugins(config: Config, registry: Registry) -> Config:
    """Return ``config`` with the settings of every plugin in use in place of its raw keys.

    Called by :func:`configure`, and by whoever puts another plugin in use afterwards (an executor).
    Raises ConfigError with every wrong key of all of them, and PluginConflictError if a platform
    and an executor of one name declare different settings.
    """
    problems: list[Problem] = []
    settings: dict[str, Any] = {}
    for plugin in registry.resolved():
        try:
            found = registry.settings(plugin.kind, plugin.name)
        except ConfigError as error:
            problems += error.problems or [_nameless(error, plugin.name)]
            continue
        if found is None:
            continue
        rival = settings.setdefault(plugin.name, found)
        if type(rival) is not type(found):
            raise PluginConflictError(
                f"two plugins named {plugin.name!r} declare different settings, "
                f"{type(rival).__qualname__} and {type(found).__qualname__}; "
                f"plugins.{plugin.name} can be read as one of them only"
            )
    if problems:
        raise config_error([evolve(each, origin=_origin_of(config, each)) for each in problems])
    kept = {
        name: config.plugins.settings[name]
        for name, found in settings.items()
        if type(config.plugins.settings.get(name)) is type(found)
    }
    merged = {**config.plugins.settings, **settings, **kept}
    return evolve(config, plugins=evolve(config.plugins, settings=merged))


def _nameless(error: ConfigError, name: str) -> Problem:
    return Problem(key=f"plugins.{name}", value=None, message=str(error))


def _origin_of(config: Config, problem: Problem) -> str:
    return problem.origin or config.origins.get(problem.key, "")


def _check_change(config: Config, platform: Platform, plugin: str, change: Change) -> None:
    wish = f"plugin {plugin!r} wants {change.key} = {change.new!r} ({change.reason})"
    key = find_key(change.key)
    if key is None and not is_plugin_key(change.key):
        near = did_you_mean(change.key, [key.path for key in KEYS])
        raise PluginError(f"{wish}, which is not a configuration key. {near}".rstrip())
    consumed = change.key.startswith(f"plugins.{platform.name}.")
    if consumed or (key is not None and key.path in CONSUMED):
        raise PluginError(f"{wish}, but that key has had its effect before plugins are asked")
    current = get(config, change.key)
    if config.is_explicit(change.key) and change.new != current:
        raise PluginError(
            f"{wish}, but {config.origins[change.key]} set it to {current!r}, and what a user sets "
            f"is never changed. Remove that setting, or name {plugin!r} in plugins.disable."
        )
    if change.old != current:
        raise PluginError(f"{wish} instead of {change.old!r}, but its value is {current!r}")


def _apply(config: Config, plugin: str, change: Change) -> Config:
    if config.is_explicit(change.key):
        return config
    try:
        result = replace(config, {change.key: change.new}, f"plugin {plugin}: {change.reason}")
    except ConfigError as error:
        raise PluginError(f"plugin {plugin!r} sets an impossible value: {error}") from error
    _logger.info(
        "%s: %r -> %r, plugin %s: %s", change.key, change.old, change.new, plugin, change.reason
    )
    return result


def fill_defaults(config: Config, platform: Platform) -> Config:
    """Return ``config`` with every value that is still open and that ``platform`` decides.

    ``max_model_len``, ``seed``, ``admission`` and ``devices`` stay open: the engine and the worker
    know them better. Explicit values stay as they are, possible or not: :func:`check` judges them.
    """
    filled = dict(_defaults(config, platform))
    return replace(config, filled, f"default of platform {platform.name}") if filled else config


def _defaults(config: Config, platform: Platform) -> Iterator[tuple[str, Any]]:
    limits = _limits(config, platform)
    cache, scheduler = config.cache, config.scheduler
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = limits.default_dtype
        yield "dtype", dtype
    if cache.kv_cache_dtype == "auto":
        yield "kv_cache_dtype", dtype
    if cache.block_size is None:
        yield "block_size", limits.block_sizes[0]
    prefixes = platform.support(Capability.PREFIX_CACHING) is Support.YES
    if cache.enable_prefix_caching and not (
        prefixes or config.is_explicit("enable_prefix_caching")
    ):
        yield "enable_prefix_caching", False
    seqs = scheduler.max_num_seqs
    if seqs is None:
        seqs = _at_most(limits.default_max_num_seqs, limits.max_num_seqs)
        yield "max_num_seqs", seqs
    tokens = scheduler.max_num_batched_tokens
    chunked = platform.support(Capability.CHUNKED_PREFILL) is Support.YES
    if tokens is None:
        least = max(seqs, limits.chunk_multiple)
        if not chunked:
            least = max(least, longest_request(config) or 0)
        tokens = max(limits.default_max_num_batched_tokens, least)
        tokens = _at_most(tokens, limits.max_num_batched_tokens)
        yield "max_num_batched_tokens", tokens
    if scheduler.prefill_chunk_size is None and chunked:
        multiple = limits.chunk_multiple
        yield "prefill_chunk_size", max(tokens // multiple * multiple, multiple)


def _limits(config: Config, platform: Platform) -> Limits:
    """Return the platform's limits; raise PluginError with all that is impossible in them."""
    limits = platform.limits(config)
    wrong = [] if limits.dtypes else ["dtypes is empty"]
    if limits.dtypes and limits.default_dtype not in limits.dtypes:
        wrong.append(f"default_dtype {limits.default_dtype!r} is not one of {limits.dtypes}")
    if not limits.block_sizes:
        wrong.append("block_sizes is empty")
    sizes = {
        "block_sizes": limits.block_sizes,
        "chunk_multiple": (limits.chunk_multiple,),
        "max_prefills_per_step": (limits.max_prefills_per_step,),
        "max_num_seqs": (limits.max_num_seqs,),
        "max_num_batched_tokens": (limits.max_num_batched_tokens,),
        "default_max_num_seqs": (limits.default_max_num_seqs,),
        "default_max_num_batched_tokens": (limits.default_max_num_batched_tokens,),
    }
    for name, values in sizes.items():
        wrong += [f"{name} has {each}" for each in values if each is not None and each < 1]
    most = limits.max_num_batched_tokens
    if most is not None and most < limits.chunk_multiple:
        wrong.append(f"chunk_multiple {limits.chunk_multiple} is over {most} tokens in a step")
    if wrong:
        raise PluginError(
            f"the limits of platform {platform.name!r} cannot be met: {'; '.join(wrong)}. Mend its "
            f"settings (plugins.{platform.name}.*), or tell whoever made it"
        )
    return limits


def _at_most(value: int, bound: int | None) -> int:
    return value if bound is None else min(value, bound)


def longest_request(config: Config) -> int | None:
    """Return the most tokens one request may have, or None while nobody knows."""
    context = None if config.description is None else config.description.context_length
    return config.model.max_model_len or context


def check(
    config: Config,
    registry: Registry,
    platform: Platform,
    executor_class: type[Executor] | None = None,
) -> None:
    """Raise one ConfigError with every problem of the complete configuration.

    Called in the driver before any worker starts: general rules against the platform's limits,
    capabilities and placement, then what ``platform.check`` itself finds. Raises PluginError if the
    platform breaks its contract (its check raises, it places no worker).
    """
    problems = list(config_problems(config, registry, platform, executor_class))
    if problems:
        raise config_error(problems)


def admission_offer(config: Config, registry: Registry, platform: Platform) -> Offer | None:
    """Return the offer of the policy that the key ``admission`` names, None where it names none.

    Called in the driver, by the engine and by the doctor. Raises PluginNotFoundError with close
    matches.
    """
    name = config.scheduler.admission
    if name is None:
        return None
    offers = registry.offers("hardpoint_scheduling", platform.name)
    if name not in offers:
        known = f"Offered are: {', '.join(sorted(offers))}." if offers else "No plugin offers any."
        raise PluginNotFoundError(
            f"admission = {name!r}: there is no such admission policy. "
            f"{names_like(name, offers)} {known}".replace("  ", " ")
        )
    return offers[name]


def effective(config: Config) -> Sequence[tuple[str, Any, str]]:
    """Return (path, value, origin) of every key, plugins' own included. Called by the doctor."""
    paths: dict[str, Any] = {key.path: get(config, key.path) for key in KEYS}
    for name, settings in config.plugins.settings.items():
        paths.update(settings_leaves(settings, name))
    return [(path, value, _origin(config, path)) for path, value in paths.items()]


def _origin(config: Config, path: str) -> str:
    if (origin := config.origins.get(path)) is not None:
        return origin
    entries: Mapping[str, str] = {
        key: origin for key, origin in config.origins.items() if key.startswith(f"{path}.")
    }
    return ", ".join(dict.fromkeys(entries.values())) or "default"
