"""Products with packed weights at each level, beside numpy in float64 over the very numbers that
are multiplied: what the weights stand for, and the activations or what they were rounded to.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hardpoint_cpu.native.packing import pack

SPEC = importlib.util.spec_from_file_location(
    "native_calls", Path(__file__).with_name("native_calls.py")
)
calls = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = calls  # attrs looks there for the names in annotations
SPEC.loader.exec_module(calls)
Kernels, Packed, GROUPS = calls.Kernels, calls.Packed, calls.GROUPS

LEVELS = calls.available_levels()
MADE = ("f32_panels", "bf16_panels", "int8", "w8a8", "w4a8")
OWN = (*calls.OWN, *calls.ROUNDING)
ROWS = (1, 2, 3, 5, 7, 16, 23, 96)
OFFSETS = {"w8a8": 128, "q8_0_a8": 128, "q4_0_a8": 8}
"""What the numbers of a type are too much as they are multiplied: sums begin with what it makes."""


@pytest.fixture(params=calls.LEVELS)
def kernels(request) -> Kernels:
    if request.param not in LEVELS:
        pytest.skip(f"{request.param}: not executed here, this processor or build has not got it")
    return Kernels(request.param)


@pytest.fixture
def draw():
    return np.random.default_rng(11)


def raw_blocks(draw, kind: str, rows: int, cols: int) -> np.ndarray:
    """A GGUF matrix of any numbers, with scales that are of use."""
    size, length = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q4_k": (256, 144),
                    "q6_k": (256, 210)}[kind]  # fmt: skip
    raw = draw.integers(0, 256, (rows, cols // size, length), dtype=np.uint8)
    scales = draw.uniform(-1, 1, (rows, cols // size, 2)).astype(np.float16).view(np.uint8)
    if kind == "q6_k":
        raw[..., -2:] = scales[..., :2]
    else:
        count = 4 if kind in ("q4_1", "q4_k") else 2
        raw[..., :count] = scales[..., :count]
    return raw.reshape(rows, -1)


def packed(draw, kind: str, rows: int, cols: int) -> Packed:
    if kind in OWN:
        own = kind.removesuffix("_a8")
        return Packed(
            pack(raw_blocks(draw, own, rows, cols), own, own, cols=cols), kind, rows, cols
        )
    weights = draw.standard_normal((rows, cols)).astype(np.float32)
    return Packed(pack(weights, "f32", kind, cols=cols), kind, rows, cols)


def sizes(draw, kind: str) -> tuple[int, int]:
    rows = int(draw.choice([1, 2, 15, 16, 17, 31, 32, 33, 64, 77]))
    unit = 256 if "_k" in kind else 32 if kind in OWN else 1
    cols = (
        unit * int(draw.choice([1, 2, 3]))
        if unit > 1
        else int(draw.choice([1, 3, 64, 65, 130, 576]))
    )
    return rows, cols


def rounded(kernels: Kernels, x: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that ``x`` is multiplied as, in float64."""
    if kind not in GROUPS:
        return x.astype(np.float64)
    group, cols = GROUPS[kind], x.shape[1]
    groups = -(-cols // group)
    sums = groups * (2 if kind == "q6_k_a8" else 1)
    out = []
    for row in kernels.activations(x, kind):
        scales = row[: groups * 4].view(np.float32).astype(np.float64)
        kept = row[groups * 4 :][: sums * 4].view(np.float32)
        numbers = row[4 * (groups + sums) :][: groups * group].view(np.int8).astype(np.float64)
        both = numbers.reshape(groups, group) * scales[:, None]
        if kind in OFFSETS:
            starts = -OFFSETS[kind] * numbers.reshape(sums, -1).sum(1)
            assert np.array_equal(kept.view(np.int32), starts)
        else:
            assert np.allclose(both.reshape(sums, -1).sum(1), kept, rtol=1e-6, equal_nan=True)
        out.append(both.ravel()[:cols])
    return np.array(out)


def near(got, x, weights, added=0.0):
    """Within float32's rounding of a sum of such products, in any order."""
    exact = x @ weights.T.astype(np.float64) + added
    size = np.abs(x) @ np.abs(weights.T.astype(np.float64))
    assert got.shape == exact.shape
    assert (np.abs(got - exact) <= 3e-6 * size.max(initial=1) + 1e-6).all()


@pytest.mark.parametrize("kind", MADE + OWN)
def test_linear_is_the_product(kernels, draw, kind):
    for _ in range(12):
        outputs, cols = sizes(draw, kind)
        rows = int(draw.choice(ROWS))
        weight = packed(draw, kind, outputs, cols)
        x = draw.standard_normal((rows, cols)).astype(np.float32)
        numbers = rounded(kernels, x, kind)
        near(kernels.linear(x, weight), numbers, weight.numbers)
        bias = draw.standard_normal(outputs).astype(np.float32)
        before = draw.standard_normal((rows, outputs)).astype(np.float32)
        near(kernels.linear(x, weight, bias, before), numbers, weight.numbers, before + bias)


@pytest.mark.parametrize("kind", MADE + OWN)
def test_a_row_of_a_product_does_not_depend_on_the_others(kernels, draw, kind):
    cols = 512 if kind in OWN else 523
    weight = packed(draw, kind, 61, cols)
    x = draw.standard_normal((40, cols)).astype(np.float32)
    whole = kernels.linear(x, weight)
    for first, last in [(0, 1), (1, 3), (5, 8), (10, 14), (3, 40), (20, 31), (7, 13)]:
        assert np.array_equal(kernels.linear(x[first:last].copy(), weight), whole[first:last])


@pytest.mark.parametrize("kind", MADE + OWN)
def test_gated_takes_two_halves_wherever_they_begin(kernels, draw, kind):
    for rows, inner in [(1, 16), (2, 48), (5, 19), (9, 33)]:
        cols = 256
        weight = packed(draw, kind, 2 * inner, cols)
        weights = weight.numbers * 0.05
        weight = (
            Packed(pack(weights, "f32", kind, cols=cols), kind, 2 * inner, cols)
            if kind in MADE
            else weight
        )
        x = draw.standard_normal((rows, cols)).astype(np.float32) * (1 if kind in MADE else 1e-3)
        both = rounded(kernels, x, kind) @ weight.numbers.T.astype(np.float64)
        gate, up = both[:, :inner], both[:, inner:]
        exact = gate / (1 + np.exp(-gate)) * up
        got = kernels.gated(x, weight)
        assert np.abs(got - exact).max() <= 1e-4 * max(1, np.abs(exact).max())


@pytest.mark.parametrize("kind", sorted(GROUPS))
def test_activations_are_rounded_to_a_127th_of_their_groups_greatest(kernels, draw, kind):
    group = GROUPS[kind]
    for cols in (1, 31, 64, 100, 256):
        x = draw.standard_normal((3, cols)).astype(np.float32) * np.float32(7)
        x[1] = 0
        got = rounded(kernels, x, kind)
        for start in range(0, cols, group):
            part = slice(start, start + group)
            most = np.abs(x[:, part]).max(1, keepdims=True)
            assert (np.abs(got[:, part] - x[:, part]) <= most / 127 * 0.5001).all()
        assert not got[1].any()


@pytest.mark.parametrize("kind", MADE + OWN)
def test_a_number_that_is_none_reaches_its_row_alone(kernels, draw, kind):
    for wrong in (np.nan, np.inf, -np.inf):
        weight = packed(draw, kind, 19, 256)
        x = draw.standard_normal((6, 256)).astype(np.float32)
        x[4, 77] = wrong
        finite = np.isfinite(kernels.linear(x, weight))
        assert finite[[0, 1, 2, 3, 5]].all()
        assert not finite[4].any()
    if kind in MADE:
        weights = np.ones((19, 256), np.float32)
        weights[3, 5] = np.nan
        weight = Packed(pack(weights, "f32", kind, cols=256), kind, 19, 256)
        got = kernels.linear(np.ones((2, 256), np.float32), weight)
        assert np.isnan(got).any(0).tolist() == [row == 3 for row in range(19)]


@pytest.mark.parametrize("kind", MADE + OWN)
def test_a_row_of_the_table_is_an_embedding(kernels, draw, kind):
    weight = packed(draw, kind, 21, 256)
    for row in (0, 15, 16, 20):
        assert np.array_equal(kernels.embed(weight, row, 1.0), weight.numbers[row])
        expected = weight.numbers[row] * np.float32(1.5)
        assert np.allclose(kernels.embed(weight, row, 1.5), expected, rtol=1e-6)


def test_the_greatest_products_do_not_overflow(kernels):
    """Where neighbours are added in 16 bits."""
    x = np.full((5, 256), -1, np.float32)
    for kind, byte in (
        ("q8_0", 0x80),
        ("q8_0", 0x7F),
        ("q4_0", 0xFF),
        ("q4_1", 0xFF),
        ("q6_k", 0xFF),
    ):
        raw = raw_blocks(np.random.default_rng(0), kind, 16, 256)
        size = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q6_k": 210}[kind]
        view = raw.reshape(16, -1, size)
        if kind == "q6_k":
            view[..., :192], view[..., 192:208] = byte, 127
        else:
            view[..., 4 if kind == "q4_1" else 2 :] = byte
        weight = Packed(pack(raw, kind, kind, cols=256), f"{kind}_a8", 16, 256)
        for sign in (1, -1):
            numbers = rounded(kernels, x * sign, weight.kind)
            near(kernels.linear(x * sign, weight), numbers, weight.numbers)


def test_logits_are_capped(kernels, draw):
    for kind in ("bf16_panels", "w8a8"):
        weight = packed(draw, kind, 40, 64)
        x = draw.standard_normal((3, 64)).astype(np.float32)
        plain = kernels.linear(x, weight).astype(np.float64)
        got = kernels.linear(x, weight, cap=5.0)
        assert np.abs(got - 5 * np.tanh(plain / 5)).max() < 1e-5


@pytest.mark.parametrize("activation", [0, 1])
def test_an_activation_is_exact_near_and_far(kernels, activation):
    gates = np.concatenate([np.linspace(-12, 12, 97), [-1e4, -90, 90, 1e4, 0, 1e-6, np.nan]])
    gates = gates.astype(np.float32)
    wide = gates.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = (
            wide / (1 + np.exp(-wide))
            if activation == 0
            else 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        )
    got = kernels.activate(np.concatenate([gates, np.full_like(gates, 2)]), activation)
    assert np.allclose(got, 2 * exact, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_a_router_takes_the_likeliest_experts(kernels, draw):
    for count, wanted in [(1, 1), (8, 2), (61, 8)]:
        x = draw.standard_normal(count).astype(np.float32) * 3
        shares = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        order = np.argsort(-x, kind="stable")[:wanted]
        chosen, got = kernels.route(x, wanted, normalised=False)
        assert chosen == order.tolist()
        assert np.allclose(got, shares[order], rtol=1e-5)
        chosen, got = kernels.route(x, wanted, normalised=True)
        assert np.allclose(got, shares[order] / shares[order].sum(), rtol=1e-5)
    chosen, _ = kernels.route(np.zeros(4, np.float32), 3, normalised=True)
    assert chosen == [0, 1, 2]
    chosen, got = kernels.route(np.array([1, np.nan, 2], np.float32), 2, normalised=True)
    assert np.isnan(got).all()
    assert len(set(chosen)) == 2


def test_a_cache_of_bytes_keeps_127_parts_of_the_greatest(kernels, draw):
    x = draw.standard_normal((5, 24)).astype(np.float32)
    x[1] = 0
    x[2, 3] = np.nan
    got = calls.cached_numbers(kernels.store(x, "int8"))
    for head in (0, 3, 4):
        assert np.abs(got[head] - x[head]).max() <= np.abs(x[head]).max() / 127 * 0.5001
    assert not got[1].any()
    assert np.isnan(got[2]).all()
