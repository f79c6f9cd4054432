"""Log-probabilities, for each request exactly as it asked, from the logits before any edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from hardpoint.messages import Logprobs
from torch import Tensor

from hardpoint_runtime.sampling.filters import ranked

if TYPE_CHECKING:
    from hardpoint.sampling_params import SamplingParams


@frozen(kw_only=True)
class LogprobAsk:
    """One row's wish: the ``count`` best tokens and the listed ``ids``, beside the sampled one."""

    row: int
    count: int
    ids: tuple[int, ...] = ()


def ask(row: int, sampling: SamplingParams, vocabulary: int) -> LogprobAsk:
    """Return what the request in ``row`` wants; -1 means the whole vocabulary."""
    count = sampling.logprobs or 0
    return LogprobAsk(
        row=row,
        count=vocabulary if count < 0 else min(count, vocabulary),
        ids=tuple(dict.fromkeys(sampling.logprob_token_ids or ())),
    )


def gather_logprobs(
    logits: Tensor,
    sampled: Tensor,
    asks: Sequence[LogprobAsk],
    to_host: Callable[[Tensor], Tensor],
) -> list[Logprobs]:
    """Return one row of log-probabilities for each ask, its columns in the order of ``Logprobs``.

    ``logits`` [n, V] are raw, ``sampled`` int64 [n]. The rank of the sampled token is how many
    log-probabilities are not below its own, 1 for the best. In a row that is not a number all
    values are NaN, and the rank is 1.
    """
    rows = torch.tensor([wish.row for wish in asks], device=logits.device)
    values = logits.index_select(0, rows).to(torch.float32).log_softmax(-1)
    chosen = sampled.index_select(0, rows)[:, None]
    own = values.gather(1, chosen)
    ranks = (values >= own).sum(-1).clamp(min=1)
    heads = list(
        zip(*(to_host(part).view(-1).tolist() for part in (chosen, own, ranks)), strict=True)
    )
    widest = max(wish.count for wish in asks)
    best: tuple[list[list[float]], list[list[int]]] = ([[]] * len(asks), [[]] * len(asks))
    if widest:
        top, ids = ranked(values, widest)
        best = (to_host(top).tolist(), to_host(ids).tolist())
    results = []
    for index, wish in enumerate(asks):
        pairs = list(zip(best[1][index], best[0][index], strict=True))[: wish.count]
        if wish.ids:
            listed = to_host(values[index])
            there = {pair[0] for pair in pairs}
            missing = [(id_, float(listed[id_])) for id_ in wish.ids if id_ not in there]
            pairs += sorted(missing, key=lambda pair: (-pair[1], pair[0]))
        token, value, rank = heads[index]
        results.append(
            Logprobs(
                ids=((token, *(pair[0] for pair in pairs)),),
                values=((value, *(pair[1] for pair in pairs)),),
                ranks=(rank,),
                num_best=wish.count,
            )
        )
    return results
