"""Random numbers as a pure function of (seed, position, lane, token): no generator, no order.

Whatever else is in the batch, however a prompt is cut into chunks, whether a request was preempted
or a graph was warmed up: the same request draws the same numbers. Every rank that samples computes
the same ones: a key on the host, and from it on the device, in integers that wrap, one number for
each token that may be chosen.

A token is chosen by an exponential race, the Gumbel-max trick in other words (Maddison, Tarlow and
Minka, "A* Sampling", 2014): with q_i ~ Exp(1), the argmax of p_i / q_i is i with probability p_i. A
small change of p matters only where two tokens come in almost together, however many there are;
where one number is looked up in the cumulative sum, it moves the bounds of all the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hardpoint_runtime.batch.columns import Array


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
"""The odd 64-bit integer closest to 2^64 divided by the golden ratio."""
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
"""Of the finaliser "Mix13" (Stafford, "Better Bit Mixing", 2011)."""
BITS = 40
"""Bits of a number: below 1/2^24 of the smallest share that a token of a large vocabulary has."""
NUMBERS = 1 << 16
"""About how many numbers are made at once: while they are made, they take four times the room of
the weights, and a processor's cache is small.
"""
BELOW_ONE = 1 - 2.0**-24
"""The greatest float32 below 1."""


def key(seed: int, position: int, lane: int = 0) -> int:
    """Return the key, a signed 64-bit integer, of the draw for the token at ``position`` of its
    request.

    ``position`` counts prompt and output tokens from 0; ``lane`` tells apart several draws for one
    position. The key is BLAKE2b over the three in decimal.
    """
    digest = hashlib.blake2b(f"{seed}:{position}:{lane}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def keys(places: Iterable[tuple[int, int]], lane: int = 0) -> Array:
    """Return int64 [n]: the key of each (seed, position)."""
    return np.fromiter((key(seed, at, lane) for seed, at in places), dtype=np.int64)


def race(weights: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Return where each row of ``weights`` [n, m], used up, has its winner: int64 [n].

    ``keys`` int64 [n]; ``ids`` [n, m] or [m] are the tokens. The greatest weight of a row is
    1, or not much less.
    """
    steps = (ids + 1).mul_(GAMMA).expand(weights.shape)
    rows = max(1, NUMBERS // weights.shape[1])
    parts = (tensor.split(rows) for tensor in (weights, keys, steps))
    for some, their_keys, their_steps in zip(*parts, strict=True):
        some.div_(exponential(split_mix(their_keys, their_steps)))
    return weights.argmin(-1)


def split_mix(keys: Tensor, steps: Tensor) -> Tensor:
    """Return int64 [n, m]: the first BITS bits of an output of the SplitMix64 generator that starts
    at ``keys`` [n], for ``steps`` [n, m] of GAMMA times 1, 2, ...

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014, with the
    constants of java.util.SplittableRandom.
    """
    mixed = steps + keys[:, None]
    shifted = torch.empty_like(mixed)
    for bits, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        mixed.bitwise_xor_(_shift(mixed, bits, shifted)).mul_(multiplier)
    _shift(mixed, 64 - BITS, mixed)
    return mixed.bitwise_xor_(torch.bitwise_right_shift(mixed, 31, out=shifted))


def exponential(numbers: Tensor) -> Tensor:
    """Return -q float32 [n, m], where q ~ Exp(1) is finite and above 0, from ``numbers`` of BITS
    bits, used up.

    q = -log(1 - u): u near 0, where the winners are, is as fine as BITS allow.
    """
    shares = numbers.bitwise_or_(1).to(torch.float32).mul_(-BELOW_ONE / (1 << BITS))
    return shares.log1p_()


def _shift(numbers: Tensor, bits: int, out: Tensor) -> Tensor:
    """Shift to the right without the sign, which torch would repeat."""
    shifted = torch.bitwise_right_shift(numbers, bits, out=out)
    return shifted.bitwise_and_((1 << (64 - bits)) - 1)
