"""Every block type against the ``gguf`` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.unpacking import UNPACKERS
from hardpoint_runtime.loading.packed import FLOAT8, PLAIN, pair_rows_to_halves, unpack

BLOCKS = {block.name: block for block in BLOCK_TYPES.values()}
HALVES = np.array(
    [0.0, -0.0, 1.0, -1.0, 6e-8, 6.1e-5, 65504, -65504, 0.333], dtype=np.float16
)  # zeros, subnormals, the largest
SCALES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the half-precision numbers of a block begin; others have one, at its beginning."""


def blocks_of(kind: str, count: int) -> np.ndarray:
    """Random blocks in which every byte value and hard scales occur."""
    numbers = np.random.default_rng(3)
    raw = numbers.integers(0, 256, (count, BLOCKS[kind].num_bytes), dtype=np.uint8)
    for place in SCALES.get(kind, [0]):
        chosen = numbers.choice(HALVES, (count, 1))
        ordinary = numbers.standard_normal((count, 1)).astype(np.float16)
        chosen = np.where(numbers.random((count, 1)) < 0.5, chosen, ordinary)
        raw[:, place : place + 2] = chosen.view(np.uint8)
    return raw


def test_the_table_has_every_type_that_is_promised():
    assert set(UNPACKERS) == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
    assert set(UNPACKERS) <= set(BLOCKS)


@pytest.mark.parametrize("kind", sorted(UNPACKERS))
@pytest.mark.parametrize("count", [1, 2, 999])
def test_unpacked_bits_are_the_references(kind, count):
    raw = blocks_of(kind, count)
    expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[kind])
    got = unpack(kind, torch.from_numpy(raw))
    assert got.shape == (count, BLOCKS[kind].elements)
    assert got.dtype is torch.float32
    assert got.is_contiguous()
    assert np.array_equal(got.numpy().view(np.uint32).reshape(-1), expected.view(np.uint32))


@pytest.mark.parametrize("kind", sorted(UNPACKERS))
def test_scales_that_are_no_numbers_stay_no_numbers(kind):
    raw = blocks_of(kind, 4)
    place = SCALES.get(kind, [0])[0]
    wild = np.array([[np.inf], [-np.inf], [np.nan], [1]], np.float16)
    raw[:, place : place + 2] = wild.view(np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[kind])
    got = unpack(kind, torch.from_numpy(raw)).reshape(-1).numpy()
    assert np.array_equal(got, expected, equal_nan=True)


def test_unpacking_leaves_the_packed_bytes_as_they_are():
    for kind in UNPACKERS:
        raw = blocks_of(kind, 3)
        before = raw.copy()
        unpack(kind, torch.from_numpy(raw))
        assert np.array_equal(raw, before), kind


def test_eight_bit_numbers_are_what_core_says_of_them():
    from hardpoint.checkpoints.float8 import FLOAT8 as TABLES

    assert set(TABLES) == set(FLOAT8)
    codes = torch.arange(256, dtype=torch.uint8)
    for kind, dtype in FLOAT8.items():
        expected = codes.view(dtype).float()
        got = torch.tensor(TABLES[kind], dtype=torch.float32)
        assert torch.equal(got.nan_to_num(7e7), expected.nan_to_num(7e7)), kind
        assert torch.equal(got.isnan(), expected.isnan())


def test_plain_types_are_those_that_core_lists():
    from hardpoint.checkpoints.unpacking import PLAIN_TYPES

    assert tuple(PLAIN) == PLAIN_TYPES


def test_rows_in_pairs_become_halves():
    rows = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13]).reshape(8, 1)  # stored: 0, half, 1, half + 1
    assert pair_rows_to_halves(rows, 2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert pair_rows_to_halves(rows.flatten(), 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
