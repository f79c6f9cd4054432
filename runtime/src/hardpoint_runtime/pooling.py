"""Prompts as vectors: final hidden states are gathered chunk by chunk and pooled at the last one.

Positions that a preemption makes the worker compute again are not gathered again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hardpoint_runtime.batch.columns import Array
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.batch.requests import Requests, RequestState
    from hardpoint_runtime.device import DeviceOps


@frozen(kw_only=True, eq=False)
class PooledSpan:
    """``count`` hidden states of one request that count for its vector; ``end`` is the position
    after the last one of the step.
    """

    state: RequestState
    count: int
    end: int


@frozen(kw_only=True, eq=False)
class PooledRows:
    """The p outputs of a step that are pooled: their ``places`` int64 [p] among the step's tokens,
    and the spans that they make up, in order.
    """

    places: Array
    spans: tuple[PooledSpan, ...]


@frozen(kw_only=True)
class Pooled:
    """The ``vectors`` of a step by request, and, for those whose vector holds NaN or infinity,
    ``nan_counts``: in how many places.
    """

    vectors: Mapping[str, tuple[float, ...]] = field(factory=dict)
    nan_counts: Mapping[str, int] = field(factory=dict)


class Pooling:
    """Pools the prompts of the requests that ask. Owned by the model runner.

    What is gathered so far, a vector float32 [H] on the device, is kept with each request.
    """

    def __init__(self, device: DeviceOps) -> None:
        self.device = device

    def rows(self, requests: Requests, inputs: BatchInputs) -> PooledRows | None:
        """Return which outputs of the step to pool; None where nobody asks."""
        if not requests.pooling:
            return None
        places, spans = [], []
        for row, req_id in enumerate(inputs.req_ids):
            if req_id not in requests.pooling:
                continue
            state = requests[req_id]
            begin, end = (int(place) for place in inputs.query_start[row : row + 2])
            first = int(inputs.positions[begin])
            chosen = _chosen(state, first, end - begin, _length(requests, state))
            places.append(begin + np.arange(chosen.start, chosen.stop) - first)
            spans.append(PooledSpan(state=state, count=len(chosen), end=first + end - begin))
        if not spans:
            return None
        return PooledRows(places=np.concatenate(places), spans=tuple(spans))

    def pool(self, rows: PooledRows | None, hidden: Tensor | None) -> Tensor | None:
        """Gather the last p rows of ``hidden`` [m + p, H]; return the first m. ``hidden`` None:
        another pipeline stage has them.
        """
        if rows is None or hidden is None:
            return hidden
        start = len(hidden) - len(rows.places)
        kept = hidden[:start]
        for span in rows.spans:
            state = span.state
            if span.count:
                total = hidden[start : start + span.count].float().sum(0)
                state.pooled = total if state.pooled is None else state.pooled + total
            state.pooled_until = max(state.pooled_until, span.end)
            start += span.count
        return kept

    def take(self, requests: Requests, req_ids: Iterable[str]) -> Pooled:
        """Return, once, the vectors of those of ``req_ids`` whose prompt is complete."""
        if not requests.pooling:
            return Pooled()
        vectors, nan_counts = {}, {}
        for req_id in req_ids:
            if req_id not in requests.pooling:
                continue
            state = requests[req_id]
            length = _length(requests, state)
            if state.pooled is None or state.pooled_until < length or state.pooling is None:
                continue
            vector = state.pooled / length if state.pooling.pooling == "mean" else state.pooled
            if state.pooling.normalize:
                vector = torch.nn.functional.normalize(vector, dim=0)
            state.pooled = None
            values = tuple(self.device.to_host(vector).tolist())
            if wrong := sum(not math.isfinite(value) for value in values):
                nan_counts[req_id] = wrong
            else:
                vectors[req_id] = values
        return Pooled(vectors=vectors, nan_counts=nan_counts)


def _length(requests: Requests, state: RequestState) -> int:
    return int(requests.columns["num_prompt"][state.slot])


def _chosen(state: RequestState, first: int, count: int, length: int) -> range:
    """Return which of the positions [first, first + count) count for the vector, and have not been
    gathered.
    """
    wanted = {"mean": range(length), "last": range(length - 1, length), "cls": range(1)}
    kind = "mean" if state.pooling is None else state.pooling.pooling
    start = max(first, state.pooled_until, wanted[kind].start)
    return range(start, max(start, min(first + count, wanted[kind].stop)))
