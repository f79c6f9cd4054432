"""Log-probabilities of prompt tokens, gathered chunk by chunk, delivered with the last one.

The output of position i scores token i + 1. Positions that a preemption makes the worker compute
again before delivery are scored again; after it, they are not. Rows of logits are computed a few at
a time, so that a long chunk takes no more room than the sampling of a full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen
from hardpoint.logprob_rows import joined
from hardpoint.messages import Logprobs
from torch import Tensor

from hardpoint_runtime.batch.columns import Array
from hardpoint_runtime.sampling.columns import Feature
from hardpoint_runtime.sampling.logprobs import LogprobAsk, LogprobsMode, gather_logprobs

if TYPE_CHECKING:
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.batch.requests import Requests, RequestState
    from hardpoint_runtime.device import DeviceOps
    from hardpoint_runtime.pooling import PooledRows

FEW_ROWS = 16
"""At least so many rows are scored at a time."""


@frozen(kw_only=True, eq=False)
class ScoredSpan:
    """The prompt positions [first, first + count) of one request, computed in this step."""

    state: RequestState
    first: int
    count: int


@frozen(kw_only=True, eq=False)
class ScoredRows:
    """The p outputs of a step that score prompt tokens: their ``places`` int64 [p] among the step's
    tokens, the ``targets`` int64 [p] that they score, and the spans that they make up, in order.
    """

    places: Array
    targets: Array
    spans: tuple[ScoredSpan, ...]


def output_rows(
    inputs: BatchInputs, more: Sequence[ScoredRows | PooledRows | None], device: DeviceOps
) -> Tensor | None:
    """Return the places int64 [m + p] of the outputs that a step needs, those to sample first; None
    where all are to be sampled.
    """
    places = [rows.places for rows in more if rows is not None]
    if places:
        return device.to_device(np.concatenate((inputs.logits_rows, *places)), torch.int64)
    if len(inputs.logits_rows) < inputs.num_tokens:
        return device.to_device(inputs.logits_rows, torch.int64)
    return None


class PromptLogprobs:
    """Scores the prompts of the requests that ask. Owned by the model runner.

    ``most_rows``: rows of logits that may be computed at once. What is found so far is kept with
    each request, and goes with it. These tokens are not chosen, so that no ``mode`` has processed
    logits of them.
    """

    def __init__(self, device: DeviceOps, most_rows: int, mode: LogprobsMode) -> None:
        self.device = device
        self.normalised = mode.normalised
        self.most_rows = max(most_rows, FEW_ROWS)

    def rows(self, requests: Requests, inputs: BatchInputs) -> ScoredRows | None:
        """Return which outputs of the step to score; None where nobody asks."""
        columns = requests.columns
        places, targets, spans = [], [], []
        for row in _asking(requests, inputs):
            state = requests[inputs.req_ids[row]]
            num_prompt = int(columns["num_prompt"][state.slot])
            begin, end = (int(place) for place in inputs.query_start[row : row + 2])
            first = int(inputs.positions[begin])
            count = min(end - begin, num_prompt - 1 - first)
            if count <= 0 or state.prompt_told:
                continue
            places.append(np.arange(begin, begin + count))
            targets.append(columns["tokens"][state.slot, first + 1 : first + 1 + count])
            spans.append(ScoredSpan(state=state, first=first, count=count))
        if not spans:
            return None
        return ScoredRows(
            places=np.concatenate(places), targets=np.concatenate(targets), spans=tuple(spans)
        )

    def score(
        self, rows: ScoredRows, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Score the last p rows of ``hidden`` [m + p, H] by the logits that they give; return the
        first m, which are sampled.
        """
        sampled = len(hidden) - len(rows.places)
        targets = self.device.to_device(rows.targets.astype(np.int64), torch.int64)
        counts = [_count(span) for span in rows.spans for _ in range(span.count)]
        found: list[Logprobs] = []
        for start in range(0, len(counts), self.most_rows):
            some = slice(start, min(start + self.most_rows, len(counts)))
            logits = compute_logits(hidden[sampled + some.start : sampled + some.stop])
            asks = [
                LogprobAsk(row=row, count=logits.shape[1] if count < 0 else count)
                for row, count in enumerate(counts[some])
            ]
            found += gather_logprobs(
                logits, targets[some], asks, self.device.to_host, normalised=self.normalised
            )
        scores = iter(found)
        for span in rows.spans:
            kept = span.state.prompt_scores
            for position in range(span.first, span.first + span.count):
                kept[position] = next(scores)
        return hidden[:sampled]

    def take(self, requests: Requests, inputs: BatchInputs) -> dict[str, Logprobs]:
        """Return, once, the scores of the step's requests whose prompt is complete, so that they
        are sampled: [prompt length - 1] rows each.
        """
        taken: dict[str, Logprobs] = {}
        for row in _asking(requests, inputs):
            req_id = inputs.req_ids[row]
            state = requests[req_id]
            if state.prompt_told or row not in inputs.sampled_rows:
                continue
            state.prompt_told = True
            scores = state.prompt_scores
            taken[req_id] = joined([scores[position] for position in sorted(scores)])
            state.prompt_scores = {}
        return taken


def _asking(requests: Requests, inputs: BatchInputs) -> list[int]:
    """Return the step's rows whose requests want their prompts scored."""
    features = requests.columns["features"][inputs.request_slots]
    rows: list[int] = np.flatnonzero(features & Feature.PROMPT_LOGPROBS).tolist()
    return rows


def _count(span: ScoredSpan) -> int:
    return span.state.sampling.prompt_logprobs or 0
