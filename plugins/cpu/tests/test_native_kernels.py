"""Each kernel at each level that this processor has, beside numpy in float64: random shapes, odd
sizes, both types of weights; and a row's numbers are the same bits whatever is computed beside it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SPEC = importlib.util.spec_from_file_location(
    "native_calls", Path(__file__).with_name("native_calls.py")
)
calls = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = calls  # attrs looks there for the names in annotations
SPEC.loader.exec_module(calls)
Kernels, as_bfloat16, widened = calls.Kernels, calls.as_bfloat16, calls.widened

LEVELS = calls.available_levels()
TYPES = ("float32", "bfloat16")
PRODUCTS = (*TYPES, "both bfloat16")
"""Types of weights, and of bfloat16 ones with activations that are rounded to bfloat16, too."""
ODD = (1, 2, 3, 5, 8, 17, 31, 64, 100, 129)


@pytest.fixture(params=calls.LEVELS)
def kernels(request) -> Kernels:
    if request.param not in LEVELS:
        pytest.skip(f"{request.param}: not executed here, this processor or build has not got it")
    return Kernels(request.param)


@pytest.fixture
def draw():
    return np.random.default_rng(7)


def matrix(draw, rows: int, cols: int, kind: str):
    """(as stored, as the numbers that it stands for)."""
    values = draw.standard_normal((rows, cols)).astype(np.float32)
    if kind == "float32":
        return values, values
    stored = as_bfloat16(values)
    return stored, widened(stored)


def rounded(kernels, x, kind: str) -> np.ndarray:
    """``x`` as it is multiplied with weights of ``kind``, in float64, nearest and ties to even."""
    if kind != "both bfloat16":
        return x.astype(np.float64)
    kernels.bfloat16 = "bf16_a16"
    bits = x.view(np.uint32).astype(np.uint64)
    halves = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return widened(halves).astype(np.float64)


def near(got, expected, scale=1.0):
    assert got.shape == expected.shape
    assert np.abs(got - expected).max(initial=0) <= 2e-5 * scale


@pytest.mark.parametrize("kind", PRODUCTS)
def test_linear_is_the_product(kernels, draw, kind):
    for _ in range(60):
        rows, outputs, inputs = (int(draw.choice(ODD)) for _ in range(3))
        weight, numbers = matrix(draw, outputs, inputs, kind)
        bias, bias_numbers = matrix(draw, 1, outputs, kind)
        x = draw.standard_normal((rows, inputs)).astype(np.float32)
        exact = rounded(kernels, x, kind) @ numbers.T.astype(np.float64)
        near(kernels.linear(x, weight), exact, inputs)
        before = draw.standard_normal((rows, outputs)).astype(np.float32)
        near(kernels.linear(x, weight, bias, before), before + exact + bias_numbers, inputs)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_row_of_a_product_does_not_depend_on_the_others(kernels, draw, kind):
    weight, _ = matrix(draw, 61, 133, kind)
    x = draw.standard_normal((40, 133)).astype(np.float32)
    rounded(kernels, x, kind)
    whole = kernels.linear(x, weight)
    for first, last in [(0, 1), (1, 3), (5, 8), (10, 14), (3, 40), (20, 31)]:
        assert np.array_equal(kernels.linear(x[first:last].copy(), weight), whole[first:last])


@pytest.mark.parametrize("kind", PRODUCTS)
def test_gated_is_silu_of_one_half_times_the_other(kernels, draw, kind):
    for rows, inner, inputs in [(1, 1, 1), (1, 48, 32), (2, 33, 17), (7, 96, 64), (96, 40, 100)]:
        weight, numbers = matrix(draw, 2 * inner, inputs, kind)
        bias, bias_numbers = matrix(draw, 1, 2 * inner, kind)
        x = draw.standard_normal((rows, inputs)).astype(np.float32)
        for given, added in ((None, 0.0), (bias, bias_numbers.astype(np.float64))):
            both = rounded(kernels, x, kind) @ numbers.T.astype(np.float64) + added
            gate, up = both[:, :inner], both[:, inner:]
            near(kernels.gated(x, weight, given), gate / (1 + np.exp(-gate)) * up, 8 * inputs)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_number_that_is_none_reaches_its_row_alone(kernels, draw, kind):
    for wrong in (np.nan, np.inf, -np.inf, -np.nan):
        for inputs in (20, 32, 77):
            weight, _ = matrix(draw, 9, inputs, kind)
            x = draw.standard_normal((6, inputs)).astype(np.float32)
            rounded(kernels, x, kind)
            x[4, inputs - 3] = wrong
            finite = np.isfinite(kernels.linear(x, weight))
            assert finite[[0, 1, 2, 3, 5]].all()
            assert not finite[4].any()


def test_gates_far_from_zero_are_open_or_shut(kernels):
    gates = np.array([-1e4, -100, -88, -20, 0, 20, 88, 100, 1e4], np.float32)
    weight = np.concatenate([gates, np.ones_like(gates)])[:, None].copy()
    got = kernels.gated(np.ones((1, 1), np.float32), weight)[0]
    near(got, np.where(gates > 10, gates, 0), 1)


@pytest.mark.parametrize("kind", TYPES)
def test_norm_divides_by_the_root_of_the_mean_square(kernels, draw, kind):
    for rows, size in [(1, 1), (3, 7), (2, 64), (5, 129)]:
        weight, numbers = matrix(draw, 1, size, kind)
        x, before = draw.standard_normal((2, rows, size)).astype(np.float32) * 3
        exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * numbers
        near(kernels.norm(x, weight[0], 1e-5), exact)
        near(kernels.norm(x, weight[0], 1e-5, before), before + exact)


@pytest.mark.parametrize("kind", TYPES)
def test_layer_norm_takes_the_mean_off_first(kernels, draw, kind):
    for rows, size in [(1, 2), (3, 7), (2, 64), (5, 129)]:
        (weight, bias), (scale, shift) = matrix(draw, 2, size, kind)
        x = draw.standard_normal((rows, size)).astype(np.float32) * 3 + 5
        wide = x.astype(np.float64)
        centred = wide - wide.mean(-1, keepdims=True)
        exact = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale
        near(kernels.layer_norm(x, weight, bias, 1e-5), exact + shift, 4)
        near(kernels.layer_norm(x, weight, None, 1e-5), exact, 4)


def test_rotate_turns_the_halves_of_each_head(kernels, draw):
    for heads, head in [(1, 2), (3, 6), (2, 64), (5, 40)]:
        x = draw.standard_normal((heads, head)).astype(np.float32)
        angles = draw.standard_normal(head // 2).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = x[:, : head // 2], x[:, head // 2 :]
        exact = np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)
        near(kernels.rotate(x, cos, sin), exact)


def test_rotate_leaves_the_rest_of_a_head_alone(kernels, draw):
    x = draw.standard_normal((3, 40)).astype(np.float32)
    angles = draw.standard_normal(12).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[:, :12], x[:, 12:24]
    got = kernels.rotate(x, cos, sin)
    near(got[:, :24], np.concatenate([a * cos - b * sin, b * cos + a * sin], 1))
    assert np.array_equal(got[:, 24:], x[:, 24:])


def test_numbers_are_stored_as_the_nearest_bfloat16(kernels, draw):
    import torch

    x = draw.standard_normal(1000).astype(np.float32)
    x[:6] = [np.nan, np.inf, -np.inf, 0.0, 1.00390625, 3e38]
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    got = kernels.store(x[None])[0]
    assert np.isnan(widened(got)[0])
    assert np.array_equal(got[1:], expected[1:])


CACHES = (*TYPES, "int8")


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("window", [0, 5, 70])
def test_attention_weighs_the_values_of_a_paged_cache(kernels, draw, kind, window):
    for head, group, block_size in [(64, 3, 16), (8, 1, 1), (24, 2, 4), (20, 5, 32)]:
        for position, tokens in [(0, 1), (0, 7), (63, 2), (64, 1), (100, 16), (200, 5)]:
            case = kernels.attention_case(
                draw, kind, head=head, group=group, block_size=block_size,
                position=position, tokens=tokens, window=window,
            )  # fmt: skip
            near(case.attended(), case.expected(), 4)


@pytest.mark.parametrize("kind", CACHES)
def test_a_token_attends_alike_in_every_chunk(kernels, draw, kind):
    for window in (0, 50):
        case = kernels.attention_case(
            draw, kind, head=24, group=3, block_size=4, position=120, tokens=16, window=window
        )
        whole = case.attended()
        for first, last in [(0, 1), (3, 4), (5, 12), (15, 16)]:
            assert np.array_equal(case.attended(first, last), whole[first:last])


@pytest.mark.parametrize("kind", CACHES)
def test_many_keys_are_summed_span_by_span(kernels, draw, kind):
    """Alike in one thread and shared out, in every chunk, and as if they were not."""
    for window in (0, 300, 700):
        case = kernels.attention_case(
            draw, kind, head=12, group=2, block_size=16, position=1017, tokens=16, window=window
        )
        whole = case.attended()
        near(whole, case.expected(), 4)
        assert np.array_equal(case.attended(by_spans=True), whole)
        for first, last in [(0, 1), (6, 7), (7, 8), (5, 12)]:
            for by_spans in (False, True):
                got = case.attended(first, last, by_spans=by_spans)
                assert np.array_equal(got, whole[first:last])


def test_scores_are_capped(kernels, draw):
    for tokens, window in [(1, 0), (9, 0), (9, 30)]:
        case = kernels.attention_case(
            draw, "float32", head=24, group=2, block_size=4, position=90, tokens=tokens,
            window=window, cap=2.5,
        )  # fmt: skip
        case.query *= 3
        near(case.attended(), case.expected(), 4)


def test_scores_far_below_zero_still_sum_to_one(kernels, draw):
    case = kernels.attention_case(
        draw, "float32", head=8, group=1, block_size=4, position=150, tokens=3, window=3
    )
    case.query[:] = 100.0
    case.keys[:] = -100.0
    near(case.attended(), case.expected(), 4)


def test_a_number_that_is_none_reaches_the_output(kernels, draw):
    case = kernels.attention_case(
        draw, "float32", head=8, group=1, block_size=4, position=9, tokens=1, window=0
    )
    case.query[0, 3] = np.nan
    assert np.isnan(case.attended())[0].tolist() == [True] * 8 + [False] * 8
    x = np.ones((2, 16), np.float32)
    x[1, 5] = np.nan
    weight = np.ones((6, 16), np.float32)
    assert np.isnan(kernels.linear(x, weight)).tolist() == [[False] * 6, [True] * 6]
    assert np.isnan(kernels.gated(x, weight)).tolist() == [[False] * 3, [True] * 3]
    assert np.isnan(kernels.norm(x, weight[0], 1e-5)[1]).all()


def test_the_best_is_the_first_of_the_greatest(kernels, draw):
    for size in (1, 7, 8, 97, 1000):
        x = draw.integers(-5, 5, size).astype(np.float32)
        assert kernels.best(x) == int(x.argmax())
        spoiled = x.copy()
        spoiled[draw.integers(size)] = np.nan
        assert kernels.best(spoiled) == -1
    assert kernels.best(np.full(5, -np.inf, np.float32)) == -1
