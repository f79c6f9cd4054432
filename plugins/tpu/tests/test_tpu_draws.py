"""The random numbers: exact integers, exponential, and the rule that other platforms draw by."""

from __future__ import annotations

import jax
import numpy as np
from hardpoint_tpu import draws

MASK = (1 << 64) - 1


def forty_bits(key: int, token: int) -> int:
    """SplitMix64 in plain integers: output ``token + 1`` of the generator begun at ``key``."""
    z = (key + (token + 1) * draws.GAMMA) & MASK
    for bits, multiplier in draws.MULTIPLIERS:
        z = ((z ^ (z >> bits)) * multiplier) & MASK
    return (z ^ (z >> 31)) >> 24


def test_the_numbers_are_those_of_splitmix64():
    vocabulary = 300
    places = [(seed, position) for seed in (0, 1, 2**64 - 1, 12345) for position in (0, 7, 8191)]
    halves = draws.keys(places, len(places))
    found = np.asarray(jax.jit(draws.exponential)(halves, draws.steps(vocabulary)))
    for row, place in enumerate(places):
        exact = [forty_bits(draws.key(*place), token) | 1 for token in range(vocabulary)]
        shares = np.asarray(exact, np.float64) * draws.SCALE
        np.testing.assert_allclose(-np.expm1(-found[row].astype(float)), shares, rtol=1e-6)
        assert (found[row] > 0).all()


def test_the_wide_product_is_exact():
    rng = np.random.default_rng(0)
    left = np.concatenate(
        [rng.integers(0, 2**32, 500, np.uint32), np.asarray([0, 1, 2**32 - 1], np.uint32)]
    )
    for right in (0, 1, 2**32 - 1, 0xBF58476D, 0x1CE4E5B9, 0x133111EB):
        high, low = draws._wide_product(jax.numpy.asarray(left), right)
        exact = [int(each) * right for each in left]
        assert np.asarray(high).tolist() == [each >> 32 for each in exact]
        assert np.asarray(low).tolist() == [each & 0xFFFFFFFF for each in exact]


def test_keys_are_padded_and_differ():
    halves = draws.keys([(5, 1), (5, 2), (6, 1)], 5)
    assert halves.shape == (2, 5)
    assert halves.dtype == np.uint32
    joined = [(int(high) << 32) | int(low) for high, low in halves.T]
    assert joined[:3] == [draws.key(5, 1), draws.key(5, 2), draws.key(6, 1)]
    assert len(set(joined[:3])) == 3
    assert joined[3:] == [0, 0]
