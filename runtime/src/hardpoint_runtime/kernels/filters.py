"""The operations of sampling that look at whole rows of logits: temperature with min-p, top-k and
top-p.

Nothing is sorted: where top-k and top-p cut is found by halving what floats there are, bit by bit,
counting how many tokens, or how much weight, lie above. Nothing is asked of the host either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import EXACT, launched
from hardpoint_runtime.sampling import filters

TOKENS = 2048
"""Tokens that a program looks at in one go; it goes through a row."""
OPTIONS = {"num_warps": 16, **EXACT}


@triton.jit
def temper_kernel(
    logits,
    temperature,
    min_p,
    scaled,
    logits_row,
    vocabulary,
    TEMPERED: tl.constexpr,
    MIN_P: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Scale one row."""
    row = tl.program_id(0).to(tl.int64)
    source, target = logits + row * logits_row, scaled + row * vocabulary
    tops = tl.full([TOKENS], float("-inf"), tl.float32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        tops = tl.maximum(
            tops, tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
        )
    top = tl.max(tops, 0)
    if TEMPERED:
        heat = tl.load(temperature + row)
        top = tl.div_rn(top, heat)
    if MIN_P:
        least = tl.load(min_p + row)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        value = tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
        if TEMPERED:
            value = tl.div_rn(value, heat)
        value -= top
        if MIN_P:
            value = tl.where(tl.exp(value) < least, float("-inf"), value)
        tl.store(target + token, value, mask=token < vocabulary)


@triton.jit
def _ordered(values):
    """Return int32 in the order of the float32 ``values``."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _amount_from(source, vocabulary, bound, least, COUNTED: tl.constexpr, TOKENS: tl.constexpr):
    """Return how many tokens are at least ``bound`` in order, or what they weigh together, of those
    that are at least ``least``.
    """
    amounts = tl.zeros([TOKENS], tl.float32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        value = tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
        order = _ordered(value)
        inside = (token < vocabulary) & (order >= bound) & (order >= least)
        if COUNTED:
            amounts += tl.where(inside, 1.0, 0.0)
        else:
            amounts += tl.where(inside, tl.exp(value), 0.0)
    return tl.sum(amounts, 0)


@triton.jit
def _greatest_bound(source, vocabulary, amount, least, COUNTED: tl.constexpr, TOKENS: tl.constexpr):
    """Return the greatest bound from which on there is at least ``amount``."""
    bound = tl.full([], -2147483648, tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    # The first bit on its own: twice this step is more than an int32 holds.
    middle = bound + step + step
    found = _amount_from(source, vocabulary, middle, least, COUNTED, TOKENS)
    bound = tl.where(found >= amount, middle, bound)
    while step > 0:
        found = _amount_from(source, vocabulary, bound + step, least, COUNTED, TOKENS)
        bound = tl.where(found >= amount, bound + step, bound)
        step = step >> 1
    return bound


@triton.jit
def truncate_kernel(scaled, top_k, top_p, kept, scaled_row, vocabulary, TOKENS: tl.constexpr):
    """Cut one row by top-k, then by top-p."""
    row = tl.program_id(0).to(tl.int64)
    source, target = scaled + row * scaled_row, kept + row * vocabulary
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    lowest = tl.full([], -2147483648, tl.int32)
    kth, edge = lowest, lowest
    above = 0.0
    wanted = 0.0
    if (k > 0) & (k < vocabulary):
        kth = _greatest_bound(source, vocabulary, k.to(tl.float32), lowest, True, TOKENS)
        edge = kth
    by_p = p < 1
    if by_p:
        wanted = p * _amount_from(source, vocabulary, kth, kth, False, TOKENS)
        edge = tl.maximum(_greatest_bound(source, vocabulary, wanted, kth, False, TOKENS), kth)
        above = _amount_from(source, vocabulary, edge + 1, kth, False, TOKENS)
    before = tl.zeros([], tl.int32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < vocabulary
        value = tl.load(source + token, mask=inside, other=float("-inf"))
        order = _ordered(value)
        equal = inside & (order == edge)
        stays = order >= edge
        if by_p:
            # Of those at the edge, the lower ids stay until there is enough.
            ones = equal.to(tl.int32)
            earlier = (before + tl.cumsum(ones, 0) - ones).to(tl.float32)
            stays = (order > edge) | (equal & (above + earlier * tl.exp(value) < wanted))
            before += tl.sum(ones, 0)
        tl.store(target + token, tl.where(stays, value, float("-inf")), mask=inside)


@launched
def temper(
    logits: torch.Tensor, temperature: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Scale as :func:`hardpoint_runtime.sampling.filters.tempered` does, of float32."""
    rows, vocabulary = logits.shape
    scaled = logits.new_empty(logits.shape)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temper_kernel[(rows,)](
        logits,
        logits if temperature is None else temperature,
        logits if min_p is None else min_p,
        scaled, logits.stride(0), vocabulary,
        TEMPERED=temperature is not None, MIN_P=min_p is not None, TOKENS=TOKENS, **OPTIONS,
    )  # fmt: skip
    return scaled


@launched
def truncate(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Cut as :func:`hardpoint_runtime.sampling.filters.truncated` does, but for the rounding of
    sums: a token may fall on the other side whose predecessors weigh p to seven digits.
    """
    rows, vocabulary = scaled.shape
    kept = scaled.new_empty(scaled.shape)
    if scaled.stride(1) != 1:
        scaled = scaled.contiguous()
    truncate_kernel[(rows,)](
        scaled, top_k, top_p, kept, scaled.stride(0), vocabulary, TOKENS=TOKENS, **OPTIONS
    )
    return kept


def draw_truncated(
    scaled: torch.Tensor,
    keys: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    largest_k: int,
    all_cut_by_k: bool,
    anyone: Callable[[torch.Tensor], list[int]],
) -> torch.Tensor:
    """Draw as :func:`hardpoint_runtime.sampling.filters.draw_truncated` does, from whole rows: the
    host is asked nothing.
    """
    del largest_k, all_cut_by_k, anyone
    return filters.draw(truncate(scaled, top_k, top_p), keys)
