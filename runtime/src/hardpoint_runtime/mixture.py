"""A mixture of experts behind its router, in plain torch: the built-in operation ``experts``.

How many tokens an expert gets is known by data alone. Eagerly the host asks for it, and each expert
computes its own tokens; in a graph, whose shapes are fixed, every expert computes every token, and
those not chosen count nothing. That is dear for many experts: a platform with a kernel of its own
offers it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    activate: Callable[[torch.Tensor], torch.Tensor],
    fixed: bool,
) -> torch.Tensor:
    """Return [T, H] of ``x`` [T, H]: for each token the sum over its ``chosen`` experts [T, k],
    int64, of ``weights`` [T, k] times ``down @ activate(gate_up @ x)``.

    ``gate_up`` is [E, 2 * N, H], ``down`` [E, H, N]; ``activate`` makes [T, N] of [T, 2 * N].
    ``fixed``: the step may be recorded, so that no shape and no host value may depend on data.
    A token's sum is in the order of the experts, whoever else is in the batch.
    """
    each = _all_tokens if fixed else _own_tokens
    return each(x, gate_up, down, chosen, weights, activate)


def _own_tokens(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    out = torch.zeros_like(x)
    order = chosen.flatten().argsort(stable=True)
    tokens, shares = order // chosen.shape[1], weights.flatten().index_select(0, order)
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        mine = tokens[start : start + count]
        inner = activate(F.linear(x.index_select(0, mine), gate_up[expert]))
        part = F.linear(inner, down[expert]) * shares[start : start + count, None]
        out.index_add_(0, mine, part.to(x.dtype))
        start += count
    return out


def _all_tokens(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    shares = weights.new_zeros((len(x), len(gate_up))).scatter_add(1, chosen, weights)
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        part = F.linear(activate(F.linear(x, gate_up[expert])), down[expert])
        out = out + (part * shares[:, expert, None]).to(x.dtype)
    return out
