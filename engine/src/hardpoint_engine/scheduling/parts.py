"""The parts of an engine core, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from hardpoint.capabilities import Capability, Support
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.config import Config
from hardpoint.config.resolution import admission_offer
from hardpoint.errors import ConfigError
from hardpoint.logits_processor import LogitsProcessor
from hardpoint.platform import Platform
from hardpoint.references import resolve_class
from hardpoint.registry import Registry

from hardpoint_engine.scheduling.admission import AdmissionPolicy, OpenAdmission
from hardpoint_engine.scheduling.block_pool import BlockPool
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.kv_planning import KVPlan
from hardpoint_engine.scheduling.step_draft import StepLimits


def make_limits(config: Config, platform: Platform) -> StepLimits:
    """Return what a step may hold: the configuration's figures and the platform's."""
    limits = platform.limits(config)
    scheduler = config.scheduler
    if scheduler.max_num_seqs is None or scheduler.max_num_batched_tokens is None:
        raise ConfigError("max_num_seqs and max_num_batched_tokens must be known here")
    return StepLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        prefill_chunk_size=scheduler.prefill_chunk_size,
        mixed_batches=limits.mixed_batches,
        max_prefills_per_step=limits.max_prefills_per_step,
        chunk_multiple=limits.chunk_multiple,
        chunked=chunks_prompts(platform),
    )


def chunks_prompts(platform: Platform) -> bool:
    """Whether the platform can compute a prompt in several steps."""
    return platform.support(Capability.CHUNKED_PREFILL) is Support.YES


def make_blocks(config: Config, description: ModelDescription, plan: KVPlan) -> KVBlocks:
    """Return the KV blocks of ``plan``, all free. Their names in the prefix cache begin with what
    the model is and how it is computed.
    """
    return KVBlocks(
        BlockPool(plan.num_blocks, reserved=plan.reserved),
        plan.block_size,
        prefix_caching=config.cache.enable_prefix_caching,
        identity=(
            description.architecture,
            str(description.path),
            description.stored_dtype,
            config.model.dtype,
            config.cache.kv_cache_dtype,
        ),
    )


def make_request_checks(
    config: Config, registry: Registry, platform: Platform
) -> Callable[[], Sequence[type[LogitsProcessor]]]:
    """Return what gives the logits processors that judge ``extra_args``. Their modules are imported
    when it is first asked: in the driver there may never be a need.
    """

    @cache
    def processors() -> Sequence[type[LogitsProcessor]]:
        if platform.support(Capability.LOGITS_PROCESSORS) is not Support.YES:
            return ()
        offers = registry.offers("hardpoint_logits_processors", platform.name)
        wanted = [*(offer.reference for offer in offers.values())]
        return [
            resolve_class(each, LogitsProcessor) if isinstance(each, str) else each
            for each in (*wanted, *config.sampling.logits_processors)
        ]

    return processors


def processor_names(config: Config, registry: Registry, platform: Platform) -> tuple[str, ...]:
    """Return the names of the logits processors that are applied to every request's logits, without
    importing them.
    """
    if platform.support(Capability.LOGITS_PROCESSORS) is not Support.YES:
        return ()
    return (
        *registry.offers("hardpoint_logits_processors", platform.name),
        *map(named, config.sampling.logits_processors),
    )


def named(processor: str | type) -> str:
    """Return the name of a configured processor."""
    return processor if isinstance(processor, str) else processor.__qualname__


def make_admission(config: Config, registry: Registry, platform: Platform) -> AdmissionPolicy:
    """Return the policy that the key ``admission`` names, of those that plugins offer through
    ``hardpoint_scheduling``; unset, the one that lets everybody run.

    Raises PluginNotFoundError with close matches, or what its construction raises.
    """
    offer = admission_offer(config, registry, platform)
    if offer is None:
        return OpenAdmission()
    policy: AdmissionPolicy = resolve_class(offer.reference, AdmissionPolicy)()
    return policy
