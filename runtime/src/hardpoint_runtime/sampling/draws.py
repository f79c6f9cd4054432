"""Random numbers as a pure function of (seed, position, lane): no generator, no state, no order.

Whatever else is in the batch, however a prompt is cut into chunks, whether a request was preempted
or a graph was warmed up: the same request draws the same numbers. Every rank that samples computes
the same ones, on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from hardpoint_runtime.batch.columns import Array

BITS = 24
"""Bits of a draw: as many as a float32 holds exactly, so that a draw never rounds up to 1."""


def uniform(seed: int, position: int, lane: int = 0) -> float:
    """Return the number in [0, 1) with which the token at ``position`` of its request is drawn.

    ``position`` counts prompt and output tokens from 0; ``lane`` tells apart several draws for one
    position. The number is the first 24 bits of BLAKE2b over the three in decimal.
    """
    digest = hashlib.blake2b(f"{seed}:{position}:{lane}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - BITS)) / (1 << BITS)


def uniforms(keys: Iterable[tuple[int, int]], lane: int = 0) -> Array:
    """Return float32 [n]: one draw for each (seed, position)."""
    return np.fromiter((uniform(seed, at, lane) for seed, at in keys), dtype=np.float32)
