"""The keys ``plugins.cpu.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class CpuSettings:
    """How the cores are used. Unset values follow the cpuset and the quota of the process."""

    threads: int | None = key(None, "threads that one worker computes with", low=1)
    cpus: str | None = key(None, "cores to run on, as 0-3,6; shared out among the workers")
    collectives: str = key(
        "auto",
        "how workers exchange tensors",
        choices=("auto", "shared_memory", "gloo"),
    )
    native: str = key(
        "auto",
        "whether steps run as a native program: where that can be, always, or never",
        choices=("auto", "on", "off"),
    )
    native_level: str = key(
        "auto",
        "instructions that a native program uses",
        choices=("auto", "portable", "avx2", "avx512", "avx512_bf16"),
    )
    activations: str = key(
        "float",
        "what weights are multiplied with: int8 is for blocks of a GGUF file that stay packed, "
        "bfloat16 for bfloat16 weights, each faster and less exact",
        choices=("float", "int8", "bfloat16"),
    )
    packed_cache: str = key(
        "auto",
        "folder where quantised weights are kept for the next start; auto: the user's, or none",
    )
    packed_cache_bytes: int = key(16 << 30, "most bytes of all files there", low=0)
