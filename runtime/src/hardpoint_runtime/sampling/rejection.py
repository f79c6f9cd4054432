"""Which drafted tokens stay: rejection sampling for speculative decoding (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023), in plain torch.

Tokens that come out are distributed as if the target model had drawn each of them. D drafts of n
rows lie one after another: those of row r are ``starts[r]:starts[r + 1]``. Results are int32
[n, K + 1], K the most drafts of a row: what stays, then one token more, then -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardpoint_runtime.sampling.draws import race

NONE = -1
"""Stands behind a row's last token."""


def accept_greedy(drafts: Tensor, starts: Tensor, best: Tensor, bonus: Tensor, most: int) -> Tensor:
    """Keep the drafts int32 [D] that equal the target's ``best`` int64 [D] up to the first that
    does not; there, ``best`` comes out. Where all stay, ``bonus`` int64 [n] follows. ``most`` is K.
    """
    return _emitted(drafts == best, drafts, starts, best, bonus, most)


def accept_drawn(
    drafts: Tensor,
    starts: Tensor,
    target: Tensor,
    proposed: Tensor | None,
    shares: Tensor,
    keys: Tensor,
    bonus: Tensor,
    most: int,
) -> Tensor:
    """Keep a draft d where p(d) / q(d) >= its share, float64 [D] uniform in [0, 1); else what
    :func:`recover` draws by ``keys`` int64 [D] comes out, and nothing after it.

    ``target`` float32 [D, V] is p, ``proposed`` q, or None for drafts without probabilities: q(d)
    is 1 then. The rest as in :func:`accept_greedy`.
    """
    places = drafts.long()[:, None]
    p = target.gather(1, places)[:, 0].double()
    q = 1.0 if proposed is None else proposed.gather(1, places)[:, 0].double()
    accepted = (p > 0) & (p >= shares * q)
    return _emitted(accepted, drafts, starts, recover(drafts, target, proposed, keys), bonus, most)


def recover(drafts: Tensor, target: Tensor, proposed: Tensor | None, keys: Tensor) -> Tensor:
    """Draw a token for each draft as if it were rejected: int64 [D], from max(p - q, 0), or from p
    without the draft, by the race of :mod:`hardpoint_runtime.sampling.draws`.
    """
    if proposed is None:
        left = target.scatter(1, drafts.long()[:, None], 0.0)
    else:
        left = (target - proposed).clamp(min=0)
    # Where nothing is left the draft cannot be rejected, but for rounding: then p is.
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, target)
    left = left / left.amax(-1, keepdim=True)
    return race(left, keys, torch.arange(left.shape[1], device=left.device))


def _emitted(
    accepted: Tensor, drafts: Tensor, starts: Tensor, otherwise: Tensor, bonus: Tensor, most: int
) -> Tensor:
    """Return what comes out, of ``accepted`` bool [D] and the tokens ``otherwise`` [D]."""
    counts = starts[1:] - starts[:-1]
    places = torch.arange(most + 1, device=drafts.device)
    real = places < counts[:, None]
    index = torch.where(real, starts[:-1, None] + places, 0).long()
    if not len(drafts):
        return torch.where(places == 0, bonus[:, None], NONE).int()
    stays = (accepted[index] & real).int().cumprod(-1).bool()
    kept = stays.sum(-1, keepdim=True)
    last = torch.where(kept == counts[:, None], bonus[:, None], otherwise[index])
    out = torch.where(stays, drafts[index].long(), last)
    return torch.where(places <= kept, out, NONE).int()
