"""What a platform can do, declared one by one; undeclared is not "no", it is an error of the
plugin.
"""

from __future__ import annotations

from enum import Enum


class Support(Enum):
    """A plugin's answer for one capability."""

    YES = "yes"
    NOT_YET = (
        "not yet"  # planned: asking raises UnsupportedError, the conformance kit expects failure
    )
    NEVER = "never"  # impossible on this hardware: asking must raise UnsupportedError


YES, NOT_YET, NEVER = Support.YES, Support.NOT_YET, Support.NEVER


class Capability(Enum):
    """The capabilities of contract number 2. The value is the name shown to people.

    A capability added later gets its number in ``SINCE``; a plugin built for an older contract that
    does not declare it counts as NOT_YET.
    """

    CHUNKED_PREFILL = "chunked prefill"
    PREFIX_CACHING = "prefix caching"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt logprobs"
    LOGPROBS_MODES = "logprobs of processed logits, and logits themselves"
    GRAMMAR = "grammar masks"
    POOLING = "pooling"
    BLOCK_COPIES = "KV block zeroing and copies"
    SPECULATIVE = "speculative decoding"
    ASYNC_SCHEDULING = "asynchronous scheduling"
    GRAPHS = "graphs"
    BATCH_INVARIANCE = "bitwise batch invariance"
    TENSOR_PARALLEL = "tensor parallelism"
    PIPELINE_PARALLEL = "pipeline parallelism"
    DATA_PARALLEL = "data parallelism"
    LORA = "LoRA adapters"
    PROMPT_ADAPTERS = "prompt adapters"
    SLEEP = "sleep and wake"
    WEIGHT_RELOAD = "weight reload"
    SHARDED_STATE = "sharded state"
    PROFILE = "profiling"
    MULTIMODAL = "multimodal input"
    PROMPT_EMBEDS = "prompt embeddings"
    KV_CONNECTOR = "KV connectors"
    EC_CONNECTOR = "encoder-cache connectors"
    LOGITS_PROCESSORS = "custom logits processors"


SINCE: dict[Capability, tuple[int, int]] = dict.fromkeys(Capability, (2, 0))

RESERVED: frozenset[Capability] = frozenset(
    {Capability.PROMPT_EMBEDS, Capability.KV_CONNECTOR, Capability.EC_CONNECTOR}
)
"""Names that this contract number keeps for a later one: no message or hook of it says how they are
asked for, so a platform declares them NOT_YET or NEVER, and nobody can be certified for them.
"""
