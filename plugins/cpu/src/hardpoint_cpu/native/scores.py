"""Log-probabilities natively: a pass over the vocabulary for each thing that a row asks for, on the
calling thread. Values are torch's up to the rounding of sums; ids and ranks go by the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from hardpoint.logprob_rows import best_ranks
from hardpoint.messages import Logprobs
from hardpoint_runtime.sampling.logprobs import gather_logprobs

from hardpoint_cpu.native import library

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.logprobs import LogprobAsk
    from torch import Tensor


def gathered(
    logits: Tensor, tokens: Sequence[int], asks: Sequence[LogprobAsk], *, normalised: bool
) -> dict[int, Logprobs]:
    """Return row -> what it asks for of ``logits`` float32 [n, V], in one piece; ``tokens`` are the
    n that were chosen. See :func:`hardpoint_runtime.sampling.logprobs.gather_logprobs`, which
    answers for rows that are no numbers.
    """
    found = {}
    for ask in asks:
        row = _scored(logits, tokens[ask.row], ask, normalised)
        if row is None:
            chosen = torch.tensor(tokens)
            (row,) = gather_logprobs(logits, chosen, [ask], lambda x: x, normalised=normalised)
        found[ask.row] = row
    return found


def _scored(logits: Tensor, token: int, ask: LogprobAsk, normalised: bool) -> Logprobs | None:
    vocabulary, most = logits.shape[1], ask.count
    listed = np.asarray(ask.ids, dtype=np.int64)
    values = np.empty(1 + most + len(listed), np.float32)
    best, ranks = np.empty(most, np.int64), np.zeros(2, np.int64)
    wrong = library.load().hp_score(
        logits.data_ptr() + 4 * vocabulary * ask.row, vocabulary, normalised, token, most,
        listed.ctypes.data, len(listed), values.ctypes.data, best.ctypes.data, ranks.ctypes.data,
    )  # fmt: skip
    if wrong:
        return None
    own, *others = values.tolist()
    best_ids, best_values = best.tolist(), others[:most]
    pairs = list(zip(best_ids, best_values, strict=True))
    if ask.ids:
        there = set(best_ids)
        missing = [
            (id_, value)
            for id_, value in zip(ask.ids, others[most:], strict=True)
            if id_ not in there
        ]
        pairs += sorted(missing, key=lambda pair: (-pair[1], pair[0]))
    rank, last = ranks.tolist()
    return Logprobs(
        ids=((token, *(pair[0] for pair in pairs)),),
        values=((own, *(pair[1] for pair in pairs)),),
        ranks=((max(rank, 1), *best_ranks(best_values, last)),),
        num_best=most,
    )
