"""The sampler: runs the sampling stages over one piece's logits and reads the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from attrs import field, frozen
from hardpoint.logprob_rows import best_ranks
from hardpoint.messages import Logprobs

from hardpoint_tpu.sampling import SamplingArrays

if TYPE_CHECKING:
    from hardpoint.sampling_params import SamplingParams

    from hardpoint_tpu.programs import Programs


@frozen(kw_only=True)
class Sampled:
    """The tokens of n rows, the log-probabilities of those that asked, and row -> how many of its
    logits were no number (0: all were -inf).
    """

    tokens: tuple[int, ...]
    logprobs: Mapping[int, Logprobs] = field(factory=dict)
    nan_counts: Mapping[int, int] = field(factory=dict)


class Sampler:
    """Chooses tokens by the stages of ``programs``. Stateless."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs

    def sample(self, logits: jax.Array, arrays: SamplingArrays, count: int) -> Sampled:
        """Choose a token for each of the first ``count`` rows of ``logits`` [R, V]."""
        stages, rows = self.programs.stages, logits.shape[0]
        edited = logits
        if arrays.edits is not None:
            edited = stages["edit"](rows, edited, *arrays.edits)
        if arrays.penalties is not None:
            penalties = arrays.penalties
            edited = stages["penalise"](
                rows, edited, penalties.counts, penalties.prompted, penalties.penalties
            )
        if arrays.draws is None:
            tokens, wrong = stages["greedy"](rows, edited)
        else:
            draws = arrays.draws
            tokens, wrong = stages["draw"](
                rows, edited, draws.numbers, draws.top_k, draws.keys, self.programs.steps
            )
        logprobs = {}
        if arrays.asks:
            scored = edited if self.programs.plan.processed else logits
            if self.programs.plan.processed and arrays.draws is not None:
                draws = arrays.draws
                scored = stages["processed"](rows, edited, draws.numbers, draws.top_k)
            logprobs = self._logprobs(scored, tokens, arrays.asks)
        chosen, bad = np.asarray(tokens)[:count].tolist(), np.asarray(wrong)[:count]
        return Sampled(
            tokens=tuple(chosen),
            logprobs=logprobs,
            nan_counts={int(row): max(0, int(bad[row])) for row in np.flatnonzero(bad)},
        )

    def _logprobs(
        self, logits: jax.Array, tokens: jax.Array, asks: Mapping[int, SamplingParams]
    ) -> dict[int, Logprobs]:
        """Return a row of log-probabilities for each ask, its columns in the order of
        ``Logprobs``.
        """
        stages, rows = self.programs.stages, logits.shape[0]
        found = [np.asarray(each) for each in stages["gather"](rows, logits, tokens)]
        own, ranks, ids, values, last = found
        most = ids.shape[1]
        wide = any(
            _count(sampling, logits.shape[1]) > most or sampling.logprob_token_ids
            for sampling in asks.values()
        )
        everything = np.asarray(stages["scores"](rows, logits)) if wide else None
        chosen = np.asarray(tokens)
        results = {}
        for row, sampling in asks.items():
            count = _count(sampling, logits.shape[1])
            if count > most and everything is not None:
                pairs, places = _ranked(everything[row], count)
            else:
                pairs = list(zip(ids[row].tolist(), values[row].tolist(), strict=True))[:count]
                places = best_ranks(values[row].tolist(), int(last[row]))[:count]
            listed = dict.fromkeys(sampling.logprob_token_ids or ())
            if listed and everything is not None:
                there = {pair[0] for pair in pairs}
                missing = [(i, float(everything[row, i])) for i in listed if i not in there]
                pairs += sorted(missing, key=lambda pair: (-pair[1], pair[0]))
            results[row] = Logprobs(
                ids=((int(chosen[row]), *(pair[0] for pair in pairs)),),
                values=((float(own[row]), *(pair[1] for pair in pairs)),),
                ranks=((int(ranks[row]), *places),),
                num_best=count,
            )
        return results


def _count(sampling: SamplingParams, vocabulary: int) -> int:
    """Return how many of the best a request wants; -1 is the whole vocabulary."""
    count = sampling.logprobs or 0
    return vocabulary if count < 0 else min(count, vocabulary)


def _ranked(row: Any, count: int) -> tuple[list[tuple[int, float]], tuple[int, ...]]:
    """Return the ``count`` best (id, value) of a row [V], the lowest id first among equals, and
    their ranks.
    """
    ids = np.argsort(-row, kind="stable")[:count]
    best = row[ids]
    ranks = best_ranks(best.tolist(), int((row >= best[-1]).sum()))
    return list(zip(ids.tolist(), best.tolist(), strict=True)), ranks
