"""Drawing a token: temperature, min-p, top-k, top-p, then the race of what is left.

All functions are row by row over logits [n, V] in float32: what a row gets depends on that row
alone. Rows without top-k and top-p are drawn from the whole vocabulary, without any sorting; the
others among no more candidates than their cut needs. A token's random number depends on its id and
the row's key, so that both ways give the same token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hardpoint_runtime.sampling.draws import race

CANDIDATES = 1024
"""How many of the best tokens are looked at first, when a row cuts by top-p."""
FEW_CANDIDATES = 64
"""The same where every row cuts by top-k, which says how many it needs."""
WIDENING = 8
"""By how much more are looked at where that was not enough."""


def tempered(logits: Tensor, temperature: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Return logits / temperature [n, V] (None: all 1), the best of each row moved to 0, and -inf
    for tokens less than min_p times as probable as it.
    """
    scaled = logits if temperature is None else logits / temperature[:, None]
    scaled = scaled - scaled.amax(-1, keepdim=True)
    if min_p is not None:
        # probability / best probability = exp(scaled): min-p needs no normalisation.
        scaled = scaled.masked_fill(scaled.exp() < min_p[:, None], -torch.inf)
    return scaled


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draw from the whole vocabulary: ids int64 [n] by the ``keys`` int64 [n].

    Uses up ``scaled``.
    """
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    return race(scaled.exp_(), keys, ids)


def draw_truncated(
    scaled: Tensor,
    keys: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    largest_k: int,
    all_cut_by_k: bool,
    anyone: Callable[[Tensor], list[int]],
) -> Tensor:
    """Draw from rows [n, V] cut by ``top_k`` int64 [n] (0: off) and ``top_p`` [n] (1: off): ids
    int64 [n].

    Top-k keeps every token that is no worse than the k-th best, ties included. Top-p then keeps
    the best of what is left until their share reaches p, at least one. ``largest_k`` is the
    greatest top_k, ``all_cut_by_k`` says that none is off; ``anyone(flags)`` gives the indices of
    the true ones on the host: rows whose cut may lie beyond the candidates looked at, which are
    looked at again with more.
    """
    vocabulary = scaled.shape[1]
    width = min(vocabulary, max(FEW_CANDIDATES if all_cut_by_k else CANDIDATES, largest_k + 1))
    total = torch.ones_like(top_p) if all_cut_by_k else scaled.exp().sum(-1)
    drawn, beyond = _draw_among(scaled, keys, top_k, top_p, total, width)
    while width < vocabulary and (rows := anyone(beyond)):
        width = min(vocabulary, width * WIDENING)
        index = torch.tensor(rows, device=scaled.device)
        again, still = _draw_among(
            scaled[index], keys[index], top_k[index], top_p[index], total[index], width
        )
        drawn = drawn.index_copy(0, index, again)
        beyond = torch.zeros_like(beyond).index_copy(0, index, still)
    return drawn


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` greatest of each row [n, count] and their ids, best first; among equals
    the lower ids come first, and are those that are taken.
    """
    best, ids = _candidates(values, count)
    if count == values.shape[1]:
        return best, ids
    # Of those equal to the last, topk took any: take the lowest ids instead.
    last = best[:, -1:]
    every = torch.arange(values.shape[1], device=values.device, dtype=torch.float32)
    equals = torch.where(values == last, -every, -torch.inf)
    lowest = equals.topk(count, dim=-1).indices
    place = torch.arange(count, device=values.device) - (best > last).sum(-1, keepdim=True)
    return best, torch.where(place < 0, ids, lowest.gather(1, place.clamp(min=0)))


def _candidates(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do as :func:`ranked`, but leave open which of those equal to the last are taken."""
    # topk leaves the order of equals open too, and 16-bit logits have many.
    ids = values.topk(count, dim=-1, sorted=False).indices.sort(-1).values
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)


def _draw_among(
    scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw among the ``width`` best; say where a cut may lie beyond them. ``total`` [n]: the weight
    of the whole row, where it is not cut by top-k.
    """
    best, ids = _candidates(scaled, width)
    cut_by_k = (top_k > 0) & (top_k < scaled.shape[1])
    kth = best.gather(1, (top_k - 1).clamp(0, width - 1)[:, None])
    within = _within(best, kth, cut_by_k, top_p, total)
    weights = best.exp().masked_fill(~within, 0.0)

    place = race(weights, keys, ids)[:, None]
    # Of a row that is not a number nothing is kept.
    last_kept = (within.sum(-1, keepdim=True) - 1).clamp(min=0)
    edge = torch.where(cut_by_k[:, None], kth, best.gather(1, last_kept))
    beyond = (edge == best[:, -1:]) & (edge > -torch.inf)
    return ids.gather(1, place)[:, 0], beyond[:, 0]


def _within(best: Tensor, kth: Tensor, cut_by_k: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """Return which of the ``best`` [n, width], best first, top-k and then top-p keep."""
    within_k = (best >= kth) | ~cut_by_k[:, None]
    weights = best.exp().masked_fill(~within_k, 0.0)
    # The running sum's end, unlike a sum, does not depend on how many zeros follow the cut.
    running = weights.cumsum(-1)
    total = torch.where(cut_by_k, running[:, -1], total)[:, None]
    return within_k & ((running - weights < top_p[:, None] * total) | (top_p >= 1)[:, None])


def truncated(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the rows [n, V] as :func:`draw_truncated` draws from them: -inf for what is cut."""
    best, ids = ranked(scaled, scaled.shape[1])
    cut_by_k = (top_k > 0) & (top_k < scaled.shape[1])
    kth = best.gather(1, (top_k - 1).clamp(min=0)[:, None])
    within = _within(best, kth, cut_by_k, top_p, scaled.exp().sum(-1))
    return scaled.masked_fill(~torch.zeros_like(within).scatter_(1, ids, within), -torch.inf)
