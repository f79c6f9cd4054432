"""Packed weights beside their definitions: GGUF's blocks as the ``gguf`` package reads them, and
what is rounded, against what was to be rounded.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hardpoint.errors import HardpointError
from hardpoint_cpu.native.library import availability
from hardpoint_cpu.native.packing import pack, packed_bytes, unpack

SPEC = importlib.util.spec_from_file_location(
    "native_calls", Path(__file__).with_name("native_calls.py")
)
calls = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = calls  # attrs looks there for the names in annotations
SPEC.loader.exec_module(calls)  # which library is tested

pytestmark = pytest.mark.skipif(not availability().levels, reason="no native library")

OWN = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
COLUMNS = {"q4_k": 256, "q6_k": 256}
MADE = ("f32_panels", "bf16_panels", "int8", "w8a8", "w4a8")


def blocks(draw, kind: str, rows: int, cols: int) -> np.ndarray:
    """Any bytes, but for scales that are of use."""
    size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    _, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    found = draw.integers(0, 256, (rows, cols // size, length), dtype=np.uint8)
    halves = draw.uniform(-2, 2, (rows, cols // size, 2)).astype(np.float16).view(np.uint8)
    if kind == "q6_k":
        found[..., -2:] = halves[..., :2]
    else:
        count = 4 if kind in ("q4_1", "q4_k") else 2
        found[..., :count] = halves[..., :count]
    return found.reshape(rows, -1)


def numbers(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])


@pytest.mark.parametrize("kind", OWN)
def test_ggufs_blocks_are_kept_exactly(kind):
    draw = np.random.default_rng(3)
    for rows, blocks_of_a_row in [(1, 1), (16, 2), (19, 3), (40, 1)]:
        cols = blocks_of_a_row * COLUMNS.get(kind, 32)
        raw = blocks(draw, kind, rows, cols)
        packed = pack(raw, kind, kind, cols=cols)
        assert len(packed) <= -(-rows // 16) * 16 / rows * raw.nbytes * 1.03
        assert np.array_equal(unpack(packed, kind, rows=rows, cols=cols), numbers(kind, raw))
        assert np.array_equal(
            unpack(packed, kind, rows=rows, cols=cols, first=rows // 2, count=1),
            numbers(kind, raw)[rows // 2 : rows // 2 + 1],
        )


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("cols", [1, 63, 64, 130])
def test_weights_are_rounded_to_what_is_near(kind, cols):
    draw = np.random.default_rng(5)
    weights = draw.standard_normal((21, cols)).astype(np.float32)
    got = unpack(pack(weights, "f32", kind, cols=cols), kind, rows=21, cols=cols)
    most = {
        "f32_panels": 0,
        "bf16_panels": 2**-8,
        "int8": 0.5 / 126,
        "w8a8": 0.5 / 126,
        "w4a8": 0.12,
    }
    scale = np.abs(weights).max() if kind in ("int8", "w8a8", "w4a8") else np.abs(weights)
    assert (np.abs(got - weights) <= most[kind] * scale + 1e-30).all()


def test_four_bits_are_nearer_than_the_line_from_least_to_greatest():
    draw = np.random.default_rng(6)
    weights = draw.standard_normal((64, 32)).astype(np.float32)
    got = unpack(pack(weights, "f32", "w4a8", cols=32), "w4a8", rows=64, cols=32)
    low, high = weights.min(1, keepdims=True), weights.max(1, keepdims=True)
    step = (high - low) / 15
    plain = np.round((weights - low) / step) * step + low
    assert ((got - weights) ** 2).sum() < 0.9 * ((plain - weights) ** 2).sum()


@pytest.mark.parametrize("kind", MADE)
def test_the_bytes_do_not_depend_on_how_it_is_cut_up(kind):
    draw = np.random.default_rng(8)
    weights = draw.standard_normal((37, 70)).astype(np.float32)
    whole = pack(weights, "f32", kind, cols=70)
    parts = np.zeros_like(whole)
    for first, last in [(20, 37), (0, 3), (3, 20)]:
        pack(weights[first:last], "f32", kind, cols=70, rows=37, first=first, out=parts)
    assert np.array_equal(whole, parts)


def test_every_kind_of_number_is_a_source():
    draw = np.random.default_rng(9)
    halves = draw.standard_normal((5, 40)).astype(np.float16)
    halves[0, :6] = [6e-8, -6e-8, 65504, -0.0, 1e-5, 3e-5]
    assert np.array_equal(
        unpack(pack(halves, "f16", "f32_panels", cols=40), "f32_panels", rows=5, cols=40),
        halves.astype(np.float32),
    )
    short = draw.integers(0, 0x7F00, (5, 40)).astype(np.uint16)
    wide = (short.astype(np.uint32) << 16).view(np.float32)
    for kind in ("bf16_panels", "f32_panels"):
        assert np.array_equal(
            unpack(pack(short, "bf16", kind, cols=40), kind, rows=5, cols=40), wide
        )
    for kind in OWN:
        raw = blocks(draw, kind, 3, 256)
        got = unpack(pack(raw, kind, "f32_panels", cols=256), "f32_panels", rows=3, cols=256)
        assert np.array_equal(got, numbers(kind, raw))


@pytest.mark.parametrize("kind", ["int8", "w4a8"])
def test_a_number_that_is_none_spoils_its_group_alone(kind):
    weights = np.ones((3, 128), np.float32)
    weights[1, 5], weights[2, 127] = np.nan, np.inf
    got = unpack(pack(weights, "f32", kind, cols=128), kind, rows=3, cols=128)
    size = 64 if kind == "int8" else 32
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1, :size]).all()
    assert np.isfinite(got[1, size:]).all()
    assert not np.isfinite(got[2, -size:]).any()


def test_what_cannot_be_is_refused():
    assert packed_bytes("q4_k", 3, 128) is None
    assert packed_bytes("f32", 3, 128) is None
    assert packed_bytes("q8_0", 0, 32) is None
    with pytest.raises(HardpointError, match=r"cannot be packed as q8_0 \[1, 33\]"):
        pack(np.zeros((1, 33), np.float32), "f32", "q8_0", cols=33)
    with pytest.raises(HardpointError, match="do not go together"):
        pack(np.zeros((1, 32), np.float32), "f32", "q8_0", cols=32)
    with pytest.raises(HardpointError, match="out of range"):
        pack(np.zeros((2, 32), np.float32), "f32", "int8", cols=32, rows=2, first=1)
    with pytest.raises(HardpointError, match="out of range"):
        unpack(np.zeros(9999, np.uint8), "int8", rows=2, cols=32, first=1, count=2)
