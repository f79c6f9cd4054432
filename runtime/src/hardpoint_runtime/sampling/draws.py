"""Random numbers as a pure function of (seed, position, lane, token): no generator, no order.

Whatever else is in the batch, however a prompt is cut into chunks, whether a request was preempted
or a graph was warmed up: the same request draws the same numbers. Every rank that samples computes
the same ones: a key on the host, and from it on the device, in integers that wrap, one number for
each token that may be chosen.

A token is chosen by the race of :mod:`hardpoint.draws`. A small change of p matters only where two
tokens come in almost together, however many there are; where one number is looked up in the
cumulative sum, it moves the bounds of all the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from hardpoint import draws as rule
from torch import Tensor

from hardpoint_runtime.batch.columns import Array


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GAMMA = _signed(rule.GAMMA)
MULTIPLIERS = tuple((bits, _signed(multiplier)) for bits, multiplier in rule.MULTIPLIERS)
BITS = 40
"""Bits of a number: below 1/2^24 of the smallest share that a token of a large vocabulary has."""
NUMBERS = 1 << 16
"""About how many numbers are made at once: while they are made, they take four times the room of
the weights, and a processor's cache is small.
"""
BELOW_ONE = 1 - 2.0**-24
"""The greatest float32 below 1."""


def key(seed: int, position: int, lane: int = 0) -> int:
    """Return :func:`hardpoint.draws.key` as a signed integer."""
    return _signed(rule.key(seed, position, lane))


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
    """
    mixed = steps + keys[:, None]
    shifted = torch.empty_like(mixed)
    for bits, multiplier in MULTIPLIERS:
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
