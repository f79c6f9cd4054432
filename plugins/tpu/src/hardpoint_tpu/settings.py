"""The keys ``plugins.tpu.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class TpuSettings:
    """Where XLA computes, which shapes it compiles, and what it keeps of that."""

    backend: str = key(
        "tpu", "where XLA computes: on TPUs, or (to try it) on the CPU", choices=("tpu", "cpu")
    )
    attention: str = key(
        "xla", "paged attention: plain XLA, or the Pallas kernel", choices=("xla", "pallas")
    )
    request_buckets: tuple[int, ...] | None = key(
        None, "batch sizes to compile, of requests that generate; unset: powers of two"
    )
    token_buckets: tuple[int, ...] | None = key(
        None, "sizes to compile, of prompt tokens in one step; unset: powers of two from 16"
    )
    layers_per_program: int | None = key(
        None, "layers compiled as one program; unset: all on TPUs, one on the CPU", low=1
    )
    max_logprobs: int = key(
        20, "log-probabilities found on the device; for more, all go to the host", low=0
    )
    compilation_cache: str = key(
        "auto", "folder for compiled programs; auto: in the user's cache folder; none: keep none"
    )
    memory_bytes: int = key(
        2 << 30, "on the CPU: host memory that stands for one device's own", low=1 << 20
    )
