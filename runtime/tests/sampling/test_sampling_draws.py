"""Keys, the hash of key and token, and the race that they run, against plain Python."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hardpoint_runtime.sampling import draws
from hardpoint_runtime.sampling.draws import BITS, GAMMA, exponential, key, keys, race, split_mix

MANY = 20_000


def numbers(keys, ids):
    return split_mix(torch.as_tensor(keys), (torch.as_tensor(ids) + 1) * GAMMA)


def in_plain_python(key, token):
    mask = (1 << 64) - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> (64 - BITS)


def test_the_documented_functions():
    """Fixed for ever: a seed given by a user gives the same tokens in later versions."""
    digest = hashlib.blake2b(b"3:5:1", digest_size=8).digest()
    assert key(3, 5, 1) == int.from_bytes(digest, "big", signed=True)
    assert (key(0, 0), key(1, 0)) == (-5574337375447872517, -1240361709818784682)
    # Published outputs of SplitMix64 from the states 0 and 1234567.
    known = ((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4), (6457827717110365317, 3203168211198807973))
    wanted = [[number >> (64 - BITS) for number in row] for row in known]
    assert numbers([0, 1234567], [0, 1]).tolist() == wanted


def test_the_hash_wraps_as_integers_of_64_bits_do():
    some = keys((seed, 9) for seed in range(50)).tolist()
    ids = [0, 1, 2, 49_151, 262_143, (1 << 31) - 1]
    wanted = [[in_plain_python(key, token) for token in ids] for key in some]
    assert numbers(some, ids).tolist() == wanted
    assert numbers(some, [ids] * 50).tolist() == wanted


def test_seeds_of_any_size_and_lanes_differ():
    assert len({key(seed, 0) for seed in (0, 1 << 64, (1 << 64) + 1, 1 << 200)}) == 4
    assert len({key(0, 0, lane) for lane in range(100)}) == 100


def over_what(name):
    """Many numbers in the unit interval, of neighbours in one way."""
    found = {
        "ids": lambda: numbers([key(5, 5)], np.arange(MANY)),
        "seeds": lambda: numbers(keys((seed, 5) for seed in range(MANY)), [7]),
        "positions": lambda: numbers(keys((5, at) for at in range(MANY)), [7]),
        "lanes": lambda: numbers([key(5, 5, lane) for lane in range(MANY)], [7]),
    }[name]()
    return found.view(-1).numpy() / (1 << BITS)


WAYS = ("ids", "seeds", "positions", "lanes")


def chi_square_is_likely(counts):
    expected = counts.sum() / counts.size
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum() / 2)
    freedom = torch.tensor((counts.size - 1) / 2, dtype=torch.float64)
    return 0.001 < float(torch.special.gammaincc(freedom, statistic)) < 0.999


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_even_in_their_leading_and_in_their_last_bits(way):
    drawn = over_what(way)
    assert chi_square_is_likely(np.bincount((drawn * 100).astype(int), minlength=100))
    last = (drawn * (1 << BITS)).astype(np.int64) % 64
    assert chi_square_is_likely(np.bincount(last, minlength=64))


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_are_independent(way):
    """Pairs fill the square evenly, and each bit agrees with its neighbour's half of the time."""
    drawn = over_what(way)
    cells = (drawn * 16).astype(int)
    for apart in (1, 2, 64):
        pairs = cells[:-apart] * 16 + cells[apart:]
        assert chi_square_is_likely(np.bincount(pairs, minlength=256))
        assert abs(np.corrcoef(drawn[:-apart], drawn[apart:])[0, 1]) < 4 / math.sqrt(MANY)
    bits = (drawn * (1 << BITS)).astype(np.int64)
    flipped = bits[1:] ^ bits[:-1]
    shares = np.array([((flipped >> bit) & 1).mean() for bit in range(BITS)])
    assert abs(shares - 0.5).max() < 4.5 * 0.5 / math.sqrt(MANY)


def test_the_numbers_of_one_key_are_independent_of_those_of_the_next():
    """A whole row of ids beside the row of the next position, seed and lane."""
    ids = np.arange(MANY)
    first = numbers([key(5, 5)], ids).view(-1).numpy() / (1 << BITS)
    for beside in (key(5, 6), key(6, 5), key(5, 5, 1)):
        second = numbers([beside], ids).view(-1).numpy() / (1 << BITS)
        cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
        assert chi_square_is_likely(np.bincount(cells, minlength=256))


def test_exponential_numbers_are_what_they_should_be_and_finite():
    ends = -exponential(torch.tensor([[0, (1 << BITS) - 1]]))
    assert 0 < ends[0, 0] < 1e-12
    assert 16 < ends[0, 1] < 17
    drawn = -exponential(numbers([key(1, 1)], np.arange(MANY)))[0].double()
    assert chi_square_is_likely(np.histogram(np.exp(-drawn.numpy()), 100, (0, 1))[0])


def test_a_winner_depends_on_the_ids_not_on_their_places_or_on_other_rows(monkeypatch):
    some = torch.from_numpy(keys((2, at) for at in range(64)))
    weights = torch.rand(64, 300, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(300)
    won = race(weights.clone(), some, ids)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    shuffled = race(weights[:, order], some, order.expand(64, -1))
    assert order[shuffled].tolist() == won.tolist()
    alone = [race(weights[row : row + 1].clone(), some[row : row + 1], ids) for row in range(64)]
    assert torch.cat(alone).tolist() == won.tolist()
    monkeypatch.setattr(draws, "NUMBERS", 7 * 300)
    assert race(weights.clone(), some, ids).tolist() == won.tolist()
    # Whoever does not win can leave.
    leaving = torch.rand(64, 300, generator=torch.Generator().manual_seed(3)) < 0.9
    weights[leaving.scatter(1, won[:, None], False)] = 0.0
    assert race(weights, some, ids).tolist() == won.tolist()
