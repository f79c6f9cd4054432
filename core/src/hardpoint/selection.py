"""Selection: from verdicts to one platform, from placement to one executor class.

Explicit beats automatic: a name in the configuration gives that plugin or an error with the first
cause. Nothing falls back. Called in the driver.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hardpoint.capabilities import Capability, Support
from hardpoint.config.checks import capability_problems
from hardpoint.config.keys import get
from hardpoint.config.problems import config_error, with_origin
from hardpoint.errors import (
    NoPlatformError,
    PluginConflictError,
    PluginError,
    PluginNotFoundError,
)
from hardpoint.offers import UNUSED
from hardpoint.records import Placement, Problem, Verdict
from hardpoint.references import checked_class, is_reference, resolve_class
from hardpoint.suggestions import how_to_install

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

_logger = logging.getLogger("hardpoint.selection")


def select_platform(registry: Registry, config: Config) -> Platform:
    """Return the platform to run on, with its hooks in use; log how it was chosen.

    A named one is taken or raises: PluginNotFoundError, PluginLoadError from the plugin's own
    exception, or NoPlatformError if its probe says that it is not usable. With none named, the
    available one of the highest priority is taken; a tie is a PluginConflictError, none at all
    NoPlatformError with every candidate's verdict.
    """
    name = config.platform
    if name is not None:
        verdict = registry.verdict("platform", name, named=True)
        if not verdict.available:
            raise NoPlatformError(
                f"platform {name!r} was asked for and is not usable here: {verdict.reason}",
                table=verdict_table(((name, verdict),)),
            )
        _logger.info("platform %s, as configured: %s", name, verdict.reason)
    else:
        name = _best(explain_selection(registry, config))
    registry.use("platform", name)
    registry.extensions()
    platform = registry.platform(name)
    _warn_of_unused(registry, platform)
    return platform


def _warn_of_unused(registry: Registry, platform: Platform) -> None:
    plugins = (*registry.used("platform"), *registry.used("extension"))
    processes = platform.support(Capability.LOGITS_PROCESSORS) is Support.YES
    for hook in UNUSED if processes else (*UNUSED, "hardpoint_logits_processors"):
        names = registry.implementers(hook)
        for provider in dict.fromkeys(p.provider for p in plugins if p.name in names):
            _logger.warning("%s of %s: nothing uses this hook in this version", hook, provider)


def explain_selection(registry: Registry, config: Config) -> tuple[tuple[str, Verdict], ...]:
    """Return every installed platform's name and verdict, in order of name.

    Probes each once for each registry. A disabled one is not asked; its verdict says so.
    """
    names = dict.fromkeys(plugin.name for plugin in registry.plugins if plugin.kind == "platform")
    enabled = registry.names("platform")
    disabled = Verdict(available=False, reason="disabled: named in plugins.disable")
    return tuple(
        (name, registry.verdict("platform", name) if name in enabled else disabled)
        for name in names
    )


def verdict_table(verdicts: tuple[tuple[str, Verdict], ...]) -> str:
    """Return the verdicts as lines of text, for people."""
    if not verdicts:
        return "  (no platform is installed: pip install hardpoint-cpu, for one)"
    width = max(len(name) for name, _ in verdicts)
    return "\n".join(
        f"  {name:<{width}}  {_availability(verdict):<16}  {verdict.reason}"
        for name, verdict in verdicts
    )


def select_executor(registry: Registry, config: Config, platform: Platform) -> type[Executor]:
    """Return the Executor class to start workers with.

    ``config.executor`` may be an Executor class, a plugin's name, or a reference; all behave the
    same. Unset: what the platform's placement says, else one worker ``uni``, one host ``mp``,
    several hosts ``ray``. Raises PluginNotFoundError (ConfigError where the platform could not use
    it anyway), WrongClassError (a TypeError), UnresolvedReferenceError (an ImportError), or
    PluginError with the reason why it is not usable.
    """
    from hardpoint.executor import Executor

    wanted = config.executor
    if wanted is None:
        wanted = default_executor(platform.placement(config))
        _logger.info("executor %s, by default", wanted)
    if not isinstance(wanted, str):
        return checked_class(wanted, Executor, "executor")
    if is_reference(wanted) and not registry.has("executor", wanted):
        return resolve_class(wanted, Executor)
    if not registry.has("executor", wanted):
        _refuse_absent(wanted, registry, config, platform)
    verdict = registry.verdict("executor", wanted, named=True)
    if not verdict.available:
        raise PluginError(f"executor {wanted!r} is not usable here: {verdict.reason}")
    executor = registry.executor(wanted)
    registry.use("executor", wanted)
    return executor


def _refuse_absent(wanted: str, registry: Registry, config: Config, platform: Platform) -> None:
    """Raise the first cause, if an executor that is not installed has another than its name: what
    the platform could not do anyway, or the key that wants an executor which nobody named.
    """
    problems = [
        with_origin(problem, config.origins)
        for problem in capability_problems(config, platform)
        if config.is_explicit(problem.key)
    ]
    if problems:
        raise config_error(problems)
    if config.executor is None and platform.placement(config).num_workers > 1:
        installed = ", ".join(registry.names("executor")) or "none"
        but = f"and the executor for that, {wanted!r}, is not installed (installed: {installed})."
        way_out = f"{how_to_install(wanted)} Or name another with the key executor."
        raise PluginNotFoundError(str(several_workers(config, platform, but, way_out)))


def several_workers(config: Config, platform: Platform, but: str, way_out: str) -> Problem:
    """Return the Problem of the key that asks for several workers; ``but`` says why it has none.

    Called here and by executors that start one worker only.
    """
    placement = platform.placement(config)
    where = "one host" if placement.num_hosts == 1 else f"{placement.num_hosts} hosts"
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")
    key = next((path for path in sizes if get(config, path) > 1), "platform")
    message = f"needs {placement.num_workers} workers on {where}, {but}"
    value = platform.name if key == "platform" else get(config, key)
    problem = Problem(key=key, value=value, message=message, way_out=way_out)
    return with_origin(problem, config.origins)


def default_executor(placement: Placement) -> str:
    """Return the name of the executor for ``placement`` when the configuration names none."""
    if placement.default_executor is not None:
        return placement.default_executor
    if placement.num_workers == 1:
        return "uni"
    return "mp" if placement.num_hosts == 1 else "ray"


def _best(verdicts: tuple[tuple[str, Verdict], ...]) -> str:
    table = verdict_table(verdicts)
    usable = [(name, each) for name, each in verdicts if each.available and each.priority >= 0]
    if not usable:
        raise NoPlatformError(
            f"no platform is usable here:\n{table}\nInstall one that fits this machine, or name "
            "one with the key `platform`",
            table=table,
        )
    highest = max(verdict.priority for _, verdict in usable)
    names = [name for name, verdict in usable if verdict.priority == highest]
    if len(names) > 1:
        raise PluginConflictError(
            f"platforms {' and '.join(names)} are usable with the same priority:\n{table}\n"
            f"Set the key `platform` to the one to use (--platform {names[0]})"
        )
    _logger.info("platform %s, the best that is usable:\n%s", names[0], table)
    return names[0]


def _availability(verdict: Verdict) -> str:
    if not verdict.available:
        return "unavailable"
    return "only by name" if verdict.priority < 0 else f"priority {verdict.priority}"
