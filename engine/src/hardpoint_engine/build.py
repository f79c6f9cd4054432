"""From a configuration to a running engine: the order in which everything is decided and started.

Runs in the driver. Nothing touches a device before the executor starts its workers, and whatever
fails leaves nothing running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attrs import evolve, frozen
from hardpoint.capabilities import Capability, Support
from hardpoint.checkpoints import read_description
from hardpoint.config import Config
from hardpoint.config.keys import replace
from hardpoint.config.resolution import check, configure, fill_defaults, structure_plugins
from hardpoint.errors import ConfigError, UnsupportedError
from hardpoint.executor import Executor
from hardpoint.platform import Platform
from hardpoint.records import Verdict
from hardpoint.registry import Registry
from hardpoint.selection import explain_selection, select_executor, select_platform

from hardpoint_engine.core import EngineCore
from hardpoint_engine.early_start import EarlyStart
from hardpoint_engine.scheduling.kv_planning import KVPlan, fit_model_len, plan_kv_cache
from hardpoint_engine.scheduling.parts import chunks_prompts, make_admission

_logger = logging.getLogger("hardpoint.engine")

ENGINE_DEFAULT = "default of the engine: the least of the model's context and the KV cache"
"""The origin of a ``max_model_len`` that nobody set."""


@frozen(kw_only=True)
class Choice:
    """What was chosen to run, before anything is started. ``config`` has the model's description
    and the defaults; ``verdicts`` are of every platform where the configuration names none, else
    empty.
    """

    config: Config
    platform: Platform
    executor_class: type[Executor]
    verdicts: tuple[tuple[str, Verdict], ...]


def start_engine(
    config: Config,
    *,
    registry: Registry | None = None,
    chosen: Callable[[Choice], None] | None = None,
) -> EngineCore:
    """Choose platform and executor, start the workers, load the model, size the KV cache.

    ``registry`` is discovered unless given. ``chosen`` is called once, before the complete
    configuration is checked and anything is started; what it raises ends the start. Raises what
    kept it from starting, typed: ConfigError with every problem at once, CheckpointError,
    MemoryBudgetError, PluginError, RemoteError.
    """
    started = time.monotonic()
    registry = registry or Registry.discover(config)
    platform = select_platform(registry, config)
    verdicts = () if config.platform is not None else explain_selection(registry, config)
    early = EarlyStart(config, registry, platform)
    with early:
        config = _described(config)
        config = configure(config, registry, platform)
        config = fill_defaults(config, platform)
        executor_class = select_executor(registry, config, platform)
        config = structure_plugins(config, registry)
        if chosen is not None:
            chosen(
                Choice(
                    config=config,
                    platform=platform,
                    executor_class=executor_class,
                    verdicts=verdicts,
                )
            )
        check(config, registry, platform, executor_class)
        refuse_unbuilt(config)
        admission = make_admission(config, registry, platform)
        executor = early.start(executor_class, config)
    try:
        config, plan = prepare_cache(config, platform, executor)
        core = EngineCore(config, registry, platform, executor, plan, admission=admission)
    except BaseException:
        executor.shutdown()
        raise
    _logger.info(
        "ready in %.2f s: %s on platform %s with executor %s, requests of up to %d tokens",
        time.monotonic() - started, core.description.path, platform.name,
        executor_class.__name__, core.max_model_len,
    )  # fmt: skip
    return core


def _described(config: Config) -> Config:
    """Add what the model's files say."""
    if config.description is not None:
        return config
    load_format = config.load.load_format
    model = config.model.model or ("dummy" if load_format == "dummy" else None)
    if model is None:
        raise ConfigError(
            "no model is named: set model to the folder of a Hugging Face checkpoint or to a GGUF "
            "file"
        )
    return evolve(config, description=read_description(model, load_format))


def refuse_unbuilt(config: Config) -> None:
    """Raise UnsupportedError for what a platform may offer and this engine does not drive yet."""
    for wanted, capability in (
        (config.speculative.num_speculative_tokens > 0, Capability.SPECULATIVE),
        (config.parallel.data_parallel_size > 1, Capability.DATA_PARALLEL),
    ):
        if wanted:
            raise UnsupportedError(
                capability.value, "hardpoint-engine", reason=Support.NOT_YET.value
            )


def prepare_cache(config: Config, platform: Platform, executor: Executor) -> tuple[Config, KVPlan]:
    """Size the KV cache and the longest request, and have the workers allocate and warm up."""
    specs = executor.get_kv_cache_specs()
    reserved = platform.limits(config).reserved_blocks
    plan = plan_kv_cache(
        specs,
        _available(config, executor),
        reserved=reserved,
        num_blocks=config.cache.num_kv_blocks,
    )
    config = _fitted(config, platform, plan)
    context, length = _lengths(config)
    if length != (executor.config.model.max_model_len or context) and chunks_prompts(platform):
        executor.update_max_model_len(length)
    executor.initialize_cache(plan.configs)
    return config, plan


def _available(config: Config, executor: Executor) -> list[int] | None:
    """Return the bytes for the KV cache on each rank: measured, or as configured; None where the
    number of blocks is configured.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return None
    if cache.kv_cache_memory_bytes is not None:
        return [cache.kv_cache_memory_bytes] * executor.world_size
    return executor.determine_available_memory()


def _lengths(config: Config) -> tuple[int, int]:
    """Return the model's context and the longest request."""
    if config.description is None:
        raise ConfigError("the engine needs the model's description")
    context = config.description.context_length
    return context, config.model.max_model_len or context


def _fitted(config: Config, platform: Platform, plan: KVPlan) -> Config:
    """Return ``config`` with the longest request that can be served, logged if nobody set it."""
    requested = config.model.max_model_len
    context, _ = _lengths(config)
    budget = None if chunks_prompts(platform) else config.scheduler.max_num_batched_tokens
    length = fit_model_len(plan, requested, context, longest_prompt=budget)
    if requested is not None:
        return config
    limit = {context: "the model's context", plan.capacity: "the KV cache"}
    _logger.info(
        "max_model_len = %d, as long as %s allows (context %d, KV cache %d tokens)",
        length, limit.get(length, "one step"), context, plan.capacity,
    )  # fmt: skip
    return replace(config, {"max_model_len": length}, ENGINE_DEFAULT)
