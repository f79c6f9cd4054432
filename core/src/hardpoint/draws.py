"""The rule of draws, for platforms that sample: numbers that depend on the request alone.

A token is chosen by an exponential race (the Gumbel-max trick; Maddison, Tarlow and Minka, "A*
Sampling", 2014): with q_i ~ Exp(1), the argmax of p_i / q_i is i with probability p_i. Of token i
(from 0), q_i = -ln(1 - u), where u = :data:`SCALE` * (the first 40 bits, the lowest bit set, of
output i + 1 of the SplitMix64 generator that begins at :func:`key`): Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", 2014. Output j of a key k, in unsigned integers of 64
bits that wrap: z = k + j * :data:`GAMMA`; z = (z ^ (z >> s)) * m for both (s, m) of
:data:`MULTIPLIERS`; z ^ (z >> 31).

Batches, chunks, preemption, ranks and warm-ups have no part in it, and platforms that follow it
draw alike.
"""

from __future__ import annotations

import hashlib
from typing import Final

GAMMA: Final = 0x9E3779B97F4A7C15
"""The odd 64-bit integer closest to 2^64 divided by the golden ratio."""
MULTIPLIERS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and multipliers of the finaliser "Mix13" (Stafford, "Better Bit Mixing", 2011)."""
SCALE: Final = (1 - 2.0**-24) / 2.0**40
"""From 40 bits to a share below 1."""


def key(seed: int, position: int, lane: int = 0) -> int:
    """Return the unsigned 64-bit key of the draw for the token at ``position`` of its request:
    BLAKE2b over the three numbers in decimal.

    ``position`` counts prompt and output tokens from 0; ``lane`` tells apart several draws for one
    position.
    """
    digest = hashlib.blake2b(f"{seed}:{position}:{lane}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
