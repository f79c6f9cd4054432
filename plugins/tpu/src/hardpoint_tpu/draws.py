"""Random numbers by the rule of :mod:`hardpoint.draws`, as all platforms make them.

JAX has no 64-bit integers unless a whole process turns them on, so they are pairs (high, low) of 32
bits here.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from hardpoint.draws import GAMMA, MULTIPLIERS, SCALE, key
from numpy.typing import NDArray

Pair = tuple[jax.Array, jax.Array]
_LOW = 0xFFFFFFFF


def keys(places: Iterable[tuple[int, int]], rows: int) -> NDArray[np.uint32]:
    """Return uint32 [2, rows], high and low halves of each (seed, position)'s key; 0 beyond."""
    found = [key(seed, position) for seed, position in places]
    halves = np.zeros((2, rows), np.uint32)
    halves[0, : len(found)] = [each >> 32 for each in found]
    halves[1, : len(found)] = [each & _LOW for each in found]
    return halves


def steps(vocabulary: int) -> NDArray[np.uint32]:
    """Return uint32 [2, vocabulary]: halves of GAMMA times 1, 2, ... for the tokens in order."""
    count = np.arange(1, vocabulary + 1, dtype=np.uint64)
    product = count * np.uint64(GAMMA)
    return np.stack((product >> np.uint64(32), product & np.uint64(_LOW))).astype(np.uint32)


def exponential(row_keys: jax.Array, token_steps: jax.Array) -> jax.Array:
    """Return float32 [R, V], q ~ Exp(1), finite and above 0, of keys [2, R] and steps [2, V]."""
    pair = _add(
        (row_keys[0][:, None], row_keys[1][:, None]), (token_steps[0][None], token_steps[1][None])
    )
    for bits, multiplier in MULTIPLIERS:
        pair = _times(_folded(pair, bits), multiplier)
    high, low = pair[0] >> 24, (pair[1] >> 24) | (pair[0] << 8)
    low = (low ^ ((high << 1) | (low >> 31))) | jnp.uint32(1)
    number = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
    return -jnp.log1p(number * -SCALE)


def _add(left: Pair, right: Pair) -> Pair:
    low = left[1] + right[1]
    carry = (low < left[1]).astype(jnp.uint32)
    return left[0] + right[0] + carry, low


def _folded(pair: Pair, bits: int) -> Pair:
    """Return the number xor itself shifted to the right by ``bits`` < 32."""
    high, low = pair
    return high ^ (high >> bits), low ^ ((low >> bits) | (high << (32 - bits)))


def _times(pair: Pair, factor: int) -> Pair:
    high, low = pair
    factor_high, factor_low = jnp.uint32(factor >> 32), jnp.uint32(factor & _LOW)
    carried, product = _wide_product(low, factor & _LOW)
    return carried + low * factor_high + high * factor_low, product


def _wide_product(left: jax.Array, right: int) -> Pair:
    """Return the 64 bits of a product of two numbers of 32, by their halves."""
    mask = jnp.uint32(0xFFFF)
    left_low, left_high = left & mask, left >> 16
    right_low, right_high = jnp.uint32(right & 0xFFFF), jnp.uint32(right >> 16)
    lowest = left_low * right_low
    middle = left_high * right_low + (lowest >> 16)
    other = left_low * right_high + (middle & mask)
    return left_high * right_high + (middle >> 16) + (other >> 16), (other << 16) | (lowest & mask)
