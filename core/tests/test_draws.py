"""The rule of draws is fixed for ever: a seed gives the same tokens in later versions."""

from __future__ import annotations

import hashlib

import pytest
from hardpoint.draws import GAMMA, MULTIPLIERS, key

MASK = (1 << 64) - 1


@pytest.mark.parametrize("lane", [0, 3])
def test_a_key_is_a_hash_of_the_three_numbers(lane):
    digest = hashlib.blake2b(f"9:4:{lane}".encode(), digest_size=8).digest()
    assert key(9, 4, lane) == int.from_bytes(digest, "big")


def test_the_constants_give_the_published_outputs():
    """Of SplitMix64 from the states 0 and 1234567."""
    for state, wanted in ((0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)):
        z = (state + GAMMA) & MASK
        for bits, multiplier in MULTIPLIERS:
            z = ((z ^ (z >> bits)) * multiplier) & MASK
        assert z ^ (z >> 31) == wanted
