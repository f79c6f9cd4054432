"""What attention adds to its scores where no fused kernel does: a cap, a slope by distance."""

from __future__ import annotations

import torch


def capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return attention [..., Q, head_v] with scores ``softcap * tanh(scores / softcap)``, of
    [..., Q, head] and [..., K, head], in float32 (Gemma 2); ``mask`` is added to the scores.
    """
    scores = (query.float() * scale) @ keys.float().transpose(-1, -2)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ values.float()).to(query.dtype)


def alibi_bias(slopes: torch.Tensor, keys: int) -> torch.Tensor:
    """Return [1, heads, 1, keys]: each head's slope [heads] times the distance from the last key
    (Press et al., 2021).

    The distance from the query itself differs from it by a constant, which softmax does not see.
    """
    distance = torch.arange(1 - keys, 1, device=slopes.device, dtype=torch.float32)
    return slopes.float().view(1, -1, 1, 1) * distance
