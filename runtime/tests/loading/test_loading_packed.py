from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint_runtime.loading.packed import UNPACKERS, pair_rows_to_halves

SIZES = {block.name: block.num_bytes for block in BLOCK_TYPES.values()}
HALVES = np.array(
    [0.0, -0.0, 1.0, -1.0, 6e-8, 6.1e-5, 65504, -65504, 0.333], dtype=np.float16
)  # zeros, subnormals, the largest


def blocks_of(kind: str, count: int) -> np.ndarray:
    """Random blocks in which every byte value and hard scales occur."""
    numbers = np.random.default_rng(3)
    raw = numbers.integers(0, 256, (count, SIZES[kind]), dtype=np.uint8)
    scales = 2 if kind == "Q4_1" else 1
    chosen = numbers.choice(HALVES, (count, scales))
    ordinary = numbers.standard_normal((count, scales)).astype(np.float16)
    chosen = np.where(numbers.random((count, scales)) < 0.5, chosen, ordinary)
    raw[:, : 2 * scales] = chosen.view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", sorted(UNPACKERS))
@pytest.mark.parametrize("count", [1, 2, 1000, 4099])
def test_unpacked_bits_are_the_references(kind, count):
    raw = blocks_of(kind, count)
    expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[kind])
    got = UNPACKERS[kind](torch.from_numpy(raw))
    assert got.shape == (count, 32)
    assert got.dtype is torch.float32
    assert np.array_equal(got.numpy().view(np.uint32).reshape(-1), expected.view(np.uint32))


@pytest.mark.parametrize("kind", sorted(UNPACKERS))
def test_scales_that_are_no_numbers_stay_no_numbers(kind):
    raw = blocks_of(kind, 4)
    raw[:, :2] = np.array([[np.inf], [-np.inf], [np.nan], [1]], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[kind])
    got = UNPACKERS[kind](torch.from_numpy(raw)).reshape(-1).numpy()
    assert np.array_equal(got, expected, equal_nan=True)


def test_rows_in_pairs_become_halves():
    rows = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13]).reshape(8, 1)  # stored: 0, half, 1, half + 1
    assert pair_rows_to_halves(rows, 2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert pair_rows_to_halves(rows.flatten(), 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
