"""What the toolkit's worker and runner do on any device, as a platform declares it. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.capabilities import NOT_YET, YES, Capability, Support

OF_THE_TOOLKIT = frozenset(
    {
        Capability.CHUNKED_PREFILL,
        Capability.PREFIX_CACHING,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.LOGPROBS_MODES,
        Capability.POOLING,
        Capability.PROFILE,
        Capability.GRAMMAR,
        Capability.LOGITS_PROCESSORS,
        Capability.BLOCK_COPIES,
        Capability.GRAPHS,
        Capability.SHARDED_STATE,
        Capability.TENSOR_PARALLEL,
        Capability.PIPELINE_PARALLEL,
    }
)
"""Offered wherever a device offers torch's operations."""


def declared(*more: Capability) -> Mapping[Capability, Support]:
    """Return an answer for every capability: yes to the toolkit's and to ``more``."""
    offered = OF_THE_TOOLKIT.union(more)
    return {each: YES if each in offered else NOT_YET for each in Capability}
