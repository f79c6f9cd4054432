"""What the worker tells of itself, by ``collective_rpc``. Imports no JAX: the driver reads it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen(kw_only=True)
class MemoryReport:
    """Bytes of one worker's devices together. ``temporaries`` is the largest work space of any
    compiled program, by XLA's own account; 0 before the warm-up.
    """

    limit: int
    weights: int
    kv_cache: int
    temporaries: int
    backend: str
    label: str

    @property
    def held(self) -> int:
        """Weights and KV cache."""
        return self.weights + self.kv_cache


@frozen(kw_only=True)
class ProgramReport:
    """What was traced and compiled: stage -> times traced, stage -> shapes compiled; programs asked
    of XLA, and how many of them came from the persistent cache.
    """

    traces: Mapping[str, int]
    shapes: Mapping[str, int]
    asked: int
    cached: int
