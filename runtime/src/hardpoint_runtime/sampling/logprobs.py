"""Log-probabilities, for each request exactly as it asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from hardpoint.logprob_rows import best_ranks
from hardpoint.messages import Logprobs
from torch import Tensor

from hardpoint_runtime.sampling.filters import ranked

if TYPE_CHECKING:
    from hardpoint.sampling_params import SamplingParams


@frozen(kw_only=True)
class LogprobsMode:
    """Which numbers requests get: of the ``processed`` logits, from which a token is chosen, or of
    those before any edit; ``normalised`` to log-probabilities, or as they are.
    """

    processed: bool = False
    normalised: bool = True

    @classmethod
    def named(cls, mode: str) -> LogprobsMode:
        """Return what a value of the key ``logprobs_mode`` means."""
        source, _, kind = mode.partition("_")
        return cls(processed=source == "processed", normalised=kind == "logprobs")


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
    *,
    normalised: bool = True,
) -> list[Logprobs]:
    """Return one row of log-probabilities for each ask, its columns in the order of ``Logprobs``.

    ``logits`` [n, V], ``sampled`` int64 [n]. The rank of a token is how many log-probabilities are
    not below its own. In a row that is not a number all values are NaN, and the token's rank is 1.
    Unless ``normalised``, values are the logits.
    """
    rows = torch.tensor([wish.row for wish in asks], device=logits.device)
    values = logits.index_select(0, rows).to(torch.float32)
    values = values.log_softmax(-1) if normalised else values
    chosen = sampled.index_select(0, rows)[:, None]
    own = values.gather(1, chosen)
    ranks = (values >= own).sum(-1).clamp(min=1)
    heads = list(
        zip(*(to_host(part).view(-1).tolist() for part in (chosen, own, ranks)), strict=True)
    )
    widest = max(wish.count for wish in asks)
    best: list[tuple[list[int], list[float], int]] = [([], [], 0)] * len(asks)
    if widest:
        top, ids = ranked(values, widest)
        last = (values >= top[:, -1:]).sum(-1)
        best = list(zip(*(to_host(part).tolist() for part in (ids, top, last)), strict=True))
    results = []
    for index, wish in enumerate(asks):
        best_ids, best_values, last_rank = best[index]
        pairs = list(zip(best_ids, best_values, strict=True))[: wish.count]
        places = best_ranks(best_values, last_rank)[: wish.count]
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
                ranks=((rank, *places),),
                num_best=wish.count,
            )
        )
    return results
