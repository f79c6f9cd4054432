"""The operations ``accept_greedy`` and ``accept_drawn``: which drafts of speculative decoding stay,
and what comes instead. Runners of this version refuse drafts, so that no step calls them yet.

Does what :mod:`hardpoint_runtime.sampling.rejection` describes, in two launches whatever the
drafts: one program for each draft finds what would come instead, one for each row chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hardpoint import draws as rule

from hardpoint_runtime.kernels.launches import EXACT, launched
from hardpoint_runtime.sampling import draws

TOKENS = 2048
"""Tokens that a program looks at in one go; it goes through a row."""
GAMMA = tl.constexpr(draws.GAMMA)
FIRST_SHIFT, SECOND_SHIFT = (tl.constexpr(bits) for bits, _ in draws.MULTIPLIERS)
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(factor) for _, factor in draws.MULTIPLIERS)
UNUSED_BITS = tl.constexpr(64 - draws.BITS)
SCALE = tl.constexpr(rule.SCALE)


@triton.jit
def _shifted(numbers, BITS: tl.constexpr):
    """Shift int64 to the right, zeros following."""
    return (numbers.to(tl.uint64, bitcast=True) >> BITS).to(tl.int64, bitcast=True)


@triton.jit
def _exponential(key, token):
    """Return q ~ Exp(1) of each token: :mod:`hardpoint.draws`."""
    mixed = key + (token.to(tl.int64) + 1) * GAMMA
    mixed = (mixed ^ _shifted(mixed, FIRST_SHIFT)) * FIRST_FACTOR
    mixed = (mixed ^ _shifted(mixed, SECOND_SHIFT)) * SECOND_FACTOR
    mixed = _shifted(mixed ^ _shifted(mixed, 31), UNUSED_BITS) | 1
    share = mixed.to(tl.float32) * SCALE
    # -log(1 - share) to the last digits where the share is small (Kahan): winners are there.
    rest = 1.0 - share
    exact = tl.log(rest) * tl.div_rn(share, rest - 1.0)
    return tl.where(rest == 1.0, share, exact)


@triton.jit
def _left(target, proposed, draft, token, inside, WITH_PROPOSED: tl.constexpr):
    """Return max(p - q, 0) of tokens, or p without the draft."""
    left = tl.load(target + token, mask=inside, other=0.0)
    if WITH_PROPOSED:
        left = tl.maximum(left - tl.load(proposed + token, mask=inside, other=0.0), 0.0)
    else:
        left = tl.where(token == draft, 0.0, left)
    return left


@triton.jit
def recover_kernel(
    drafts, target, proposed, keys, recovered, vocabulary, WITH_PROPOSED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Draw the token that comes if one draft is rejected."""
    place = tl.program_id(0).to(tl.int64)
    target += place * vocabulary
    proposed += place * vocabulary
    draft = tl.load(drafts + place)
    tops = tl.zeros([TOKENS], tl.float32)
    whole = tl.zeros([TOKENS], tl.float32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < vocabulary
        tops = tl.maximum(tops, _left(target, proposed, draft, token, inside, WITH_PROPOSED))
        whole = tl.maximum(whole, tl.load(target + token, mask=inside, other=0.0))
    top = tl.max(tops, 0)
    nothing = top <= 0
    top = tl.where(nothing, tl.max(whole, 0), top)
    key = tl.load(keys + place)
    first = tl.full([], float("inf"), tl.float32)
    winner = tl.zeros([], tl.int32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < vocabulary
        left = _left(target, proposed, draft, token, inside, WITH_PROPOSED)
        left = tl.where(nothing, tl.load(target + token, mask=inside, other=0.0), left)
        arrival = tl.div_rn(-tl.div_rn(left, top), _exponential(key, token))
        arrival = tl.where(inside, arrival, float("inf"))
        earliest = tl.min(arrival, 0)
        at = tl.min(tl.where(arrival == earliest, token, vocabulary), 0)
        winner = tl.where(earliest < first, at, winner)
        first = tl.minimum(first, earliest)
    tl.store(recovered + place, winner.to(tl.int64))


@triton.jit
def accept_kernel(
    drafts, starts, target, proposed, shares, otherwise, bonus, out, vocabulary, out_row,
    GREEDY: tl.constexpr, WITH_PROPOSED: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Choose the tokens of one row."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    place = tl.arange(0, PLACES)
    real = place < count
    draft = tl.load(drafts + start + place, mask=real, other=0)
    instead = tl.load(otherwise + start + place, mask=real, other=0)
    if GREEDY:
        accepted = draft.to(tl.int64) == instead
    else:
        at = (start + place).to(tl.int64) * vocabulary + draft
        p = tl.load(target + at, mask=real, other=0.0).to(tl.float64)
        bound = tl.load(shares + start + place, mask=real, other=0.0)
        if WITH_PROPOSED:
            bound *= tl.load(proposed + at, mask=real, other=0.0).to(tl.float64)
        accepted = (p > 0) & (p >= bound)
    kept = tl.min(tl.where(real & accepted, count, tl.minimum(place, count)), 0)
    last = tl.where(kept == count, tl.load(bonus + row), instead)
    token = tl.where(place < kept, draft.to(tl.int64), last)
    token = tl.where(place <= kept, token, -1)
    tl.store(out + row * out_row + place, token.to(tl.int32), mask=place < out_row)


@launched
def accept_greedy(
    drafts: torch.Tensor, starts: torch.Tensor, best: torch.Tensor, bonus: torch.Tensor, most: int
) -> torch.Tensor:
    """Keep as :func:`hardpoint_runtime.sampling.rejection.accept_greedy` does."""
    return _accept(drafts, starts, None, None, None, best, bonus, most)


@launched
def accept_drawn(
    drafts: torch.Tensor,
    starts: torch.Tensor,
    target: torch.Tensor,
    proposed: torch.Tensor | None,
    shares: torch.Tensor,
    keys: torch.Tensor,
    bonus: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Keep as :func:`hardpoint_runtime.sampling.rejection.accept_drawn` does, but for the rounding
    of logarithms: tokens that come in within seven digits of each other may change places.
    """
    otherwise = torch.zeros(len(drafts), dtype=torch.int64, device=drafts.device)
    if len(drafts):
        recover_kernel[(len(drafts),)](
            drafts, target, target if proposed is None else proposed, keys, otherwise,
            target.shape[1], WITH_PROPOSED=proposed is not None, TOKENS=TOKENS, **EXACT,
        )  # fmt: skip
    return _accept(drafts, starts, target, proposed, shares, otherwise, bonus, most)


def _accept(
    drafts: torch.Tensor,
    starts: torch.Tensor,
    target: torch.Tensor | None,
    proposed: torch.Tensor | None,
    shares: torch.Tensor | None,
    otherwise: torch.Tensor,
    bonus: torch.Tensor,
    most: int,
) -> torch.Tensor:
    rows = len(bonus)
    out = torch.empty((rows, most + 1), dtype=torch.int32, device=drafts.device)
    any_tensor = bonus
    accept_kernel[(rows,)](
        drafts, starts,
        any_tensor if target is None else target,
        any_tensor if proposed is None else proposed,
        any_tensor if shares is None else shares,
        otherwise, bonus, out, 0 if target is None else target.shape[1], most + 1,
        GREEDY=target is None, WITH_PROPOSED=proposed is not None,
        PLACES=triton.next_power_of_2(most + 1), num_warps=1, **EXACT,
    )  # fmt: skip
    return out
