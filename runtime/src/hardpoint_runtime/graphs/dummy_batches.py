"""Batches that belong to nobody, of the shape of a graph: what it is captured with.

Nothing is written for them (slot -1) and they read the null block, so that neither requests nor
caches notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardpoint_runtime.batch.inputs import BatchInputs
from hardpoint_runtime.graphs.dispatcher import Dispatch
from hardpoint_runtime.graphs.plan import Capture


def dummy_batch(
    capture: Capture,
    *,
    uniform_query: int,
    most_rows: int,
    longest: int,
    block_sizes: Sequence[int],
    other: bool = False,
) -> BatchInputs:
    """Return a batch of the shape of ``capture``, its rows no longer than ``longest``.

    ``other``: another one of the same shape, with other lengths, and padded where the shape leaves
    room: what a step may bring later. ``most_rows`` is how many requests run at most.
    """
    key = capture.key
    rows = min(key.num_tokens, most_rows) if key.num_reqs is None else key.num_reqs
    queries = _queries(key.num_tokens, rows, uniform_query if key.uniform else None, longest)
    if other and len(queries) > 1:
        queries = queries[:-1]
    context = min(longest - max(queries), 2 * max(block_sizes, default=1)) if other else 0
    padded_rows = len(queries) if key.num_reqs is None else key.num_reqs
    starts = np.concatenate(([0], np.cumsum(queries)))
    places = np.concatenate([np.arange(count) for count in queries]) + context
    total = int(starts[-1])
    lengths = np.zeros(padded_rows, dtype=np.int32)
    lengths[: len(queries)] = np.asarray(queries) + context
    query_start = np.full(padded_rows + 1, total, dtype=np.int32)
    query_start[: len(starts)] = starts
    positions = np.zeros(key.num_tokens, dtype=np.int64)
    positions[:total] = places
    longest_here = int(lengths.max())
    return BatchInputs(
        req_ids=("",) * len(queries),
        request_slots=np.zeros(0, dtype=np.int64),
        num_reqs=padded_rows,
        num_tokens=key.num_tokens,
        token_ids=np.zeros(key.num_tokens, dtype=np.int64),
        positions=positions,
        row_of_token=np.repeat(np.arange(len(queries)), queries),
        query_start=query_start,
        seq_lens=lengths,
        cache_slots=tuple(np.full(key.num_tokens, -1, dtype=np.int64) for _ in block_sizes),
        block_tables=tuple(
            np.zeros((padded_rows, -(-longest_here // size)), dtype=np.int32)
            for size in block_sizes
        ),
        sampled_rows=np.zeros(0, dtype=np.int64),
        logits_rows=np.zeros(0, dtype=np.int64),
        dispatch=Dispatch(mode=capture.mode, key=key),
    )


def _queries(tokens: int, rows: int, uniform: int | None, longest: int) -> list[int]:
    """Share out ``tokens`` among up to ``rows`` rows, none longer than ``longest``."""
    if uniform is not None:
        return [uniform] * rows
    share, rest = divmod(tokens, rows)
    return [min(share + (row < rest), longest) for row in range(rows)]
