"""The keys ``plugins.dummy.*``."""

from __future__ import annotations

from attrs import frozen
from hardpoint.config.schema import key


@frozen(kw_only=True)
class DummySettings:
    """What the fake device is like, and where it shall fail."""

    num_workers: int | None = key(None, "workers; unset: what the parallel sizes need", low=1)
    num_devices: int = key(1, "fake devices of the machine", low=1)
    memory_bytes: int = key(64 << 20, "memory of a fake device", low=0)
    weight_bytes: int = key(4096, "bytes that the fake weights take", low=0)
    load_seconds: float = key(0.0, "seconds that loading takes", low=0)
    step_seconds: float = key(0.0, "seconds that a step takes", low=0)
    fail_at: str = key(
        "",
        "faults, by commas: POINT[:NTH][@RANK][=raise|exit|hang|kill|stop|memory_error|ignore_term]"
        ", POINT one of build, init_device, load, warm_up, step, sample, shutdown",
    )
    fault_log: str | None = key(None, "folder in which the faults that fired are counted")
    silent_after: float = key(60.0, "seconds for which a worker may give no sign of life", above=0)
    exclusive: bool = key(False, "allow one engine of this platform in a process")
    transfer_steps: int = key(1, "steps after which a fake KV transfer is finished", low=0)
    trace_folder: str | None = key(None, "where profile() writes its traces")
    block_sizes: tuple[int, ...] = key((16, 1, 2, 4, 8, 32, 64), "KV block sizes, default first")
    mixed_batches: bool = key(True, "whether a step may mix prefill and decode")
    max_prefills_per_step: int | None = key(None, "most prefills in one step", low=1)
    chunk_multiple: int = key(1, "a chunk that does not end its prompt is a multiple", low=1)
    reserved_blocks: int = key(1, "KV blocks kept back, the null block included", low=1)
    max_num_seqs: int | None = key(None, "upper bound of the key max_num_seqs", low=1)
    max_num_batched_tokens: int | None = key(
        None, "upper bound of the key max_num_batched_tokens", low=1
    )
