"""One step's inputs, built from the requests: ids, positions, lengths, cache slots, rows to sample.

Plain host arrays; the runner copies them to the device, the attention builder reads their lengths
here without ever asking the device. Padding rows and tokens are inert: length 0, cache slot -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from hardpoint_runtime.batch.columns import Array
from hardpoint_runtime.batch.requests import is_complete
from hardpoint_runtime.graphs.modes import GraphMode

if TYPE_CHECKING:
    from hardpoint_runtime.batch.requests import Requests
    from hardpoint_runtime.graphs.dispatcher import Dispatch


@frozen(kw_only=True, eq=False)
class BatchInputs:
    """The inputs of one step: n requests in ``num_reqs`` rows, t tokens in ``num_tokens`` places.

    ``req_ids`` [n] and ``request_slots`` int64 [n] are in batch order. ``token_ids`` and
    ``positions`` int64 [num_tokens]; ``row_of_token`` int64 [t]; ``query_start`` int32
    [num_reqs + 1], cumulative, its last value repeated over padding; ``seq_lens`` int32 [num_reqs]:
    computed + scheduled, 0 for padding. ``cache_slots[g]`` int64 [num_tokens], -1 for padding, and
    ``block_tables[g]`` int32 [num_reqs, cols] belong to KV cache group g; ``cache_slots`` is empty
    where the device finds them. ``sampled_rows`` int64
    [m] are the rows whose next token can be drawn, ``logits_rows`` int64 [m] the places of their
    last tokens. ``dispatch`` says which graph the batch is padded for, None: none.
    """

    req_ids: tuple[str, ...]
    request_slots: Array
    num_reqs: int
    num_tokens: int
    token_ids: Array
    positions: Array
    row_of_token: Array
    query_start: Array
    seq_lens: Array
    cache_slots: tuple[Array, ...]
    block_tables: tuple[Array, ...]
    sampled_rows: Array
    logits_rows: Array
    dispatch: Dispatch | None = None

    @property
    def max_query(self) -> int:
        """The most tokens that one request computes in this step."""
        return int(np.diff(self.query_start).max(initial=0))

    @property
    def max_seq(self) -> int:
        """The longest sequence of this step."""
        return int(self.seq_lens.max(initial=0))

    @property
    def sampled_ids(self) -> tuple[str, ...]:
        """The requests whose next token can be drawn, in batch order."""
        return tuple(self.req_ids[row] for row in self.sampled_rows)


def batch_order(num_tokens: Mapping[str, int]) -> tuple[str, ...]:
    """Return the batch order of a plan: single tokens (decode) first, then the rest, else as
    planned, so that attention finds each kind in one piece.
    """
    return tuple(sorted(num_tokens, key=lambda req_id: num_tokens[req_id] > 1))


def build_inputs(
    requests: Requests,
    req_ids: Sequence[str],
    num_scheduled: Sequence[int],
    *,
    padded_reqs: int | None = None,
    padded_tokens: int | None = None,
    dispatch: Dispatch | None = None,
    device_slots: bool = False,
) -> BatchInputs:
    """Build the inputs of the named requests, ``num_scheduled[i]`` tokens of request i, padded to
    ``padded_reqs`` rows and ``padded_tokens`` tokens (None: as many as there are), or to the shape
    of the graph that ``dispatch`` names. ``device_slots``: no slot is found here.
    """
    if dispatch is not None and dispatch.mode is not GraphMode.NONE:
        padded_reqs, padded_tokens = dispatch.key.num_reqs, dispatch.key.num_tokens
    columns = requests.columns
    counts = np.asarray(num_scheduled, dtype=np.int64)
    slots = np.asarray([requests.slot_of(req_id) for req_id in req_ids], dtype=np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    rows, places = padded_reqs or len(slots), padded_tokens or total

    row_of_token = np.repeat(np.arange(len(slots)), counts)
    offsets = np.arange(total) - np.repeat(ends - counts, counts)
    computed = columns.gather("num_computed", slots).astype(np.int64)
    positions = computed[row_of_token] + offsets
    token_ids = columns["tokens"][slots[row_of_token], positions]
    complete = is_complete(requests, slots, counts)
    if requests.pooling:
        complete &= np.asarray([req_id not in requests.pooling for req_id in req_ids])
    sampled = np.flatnonzero(complete)
    query_start = np.full(rows + 1, total, dtype=np.int32)
    query_start[0] = 0
    query_start[1 : len(slots) + 1] = ends

    tables = requests.block_tables.tables
    return BatchInputs(
        req_ids=tuple(req_ids),
        request_slots=slots,
        num_reqs=rows,
        num_tokens=places,
        token_ids=_padded(token_ids, places, 0, np.int64),
        positions=_padded(positions, places, 0, np.int64),
        row_of_token=row_of_token,
        query_start=query_start,
        seq_lens=_padded(computed + counts, rows, 0, np.int32),
        cache_slots=tuple(
            _padded(table.slot_mapping(slots, row_of_token, positions), places, -1, np.int64)
            for table in (() if device_slots else tables)
        ),
        block_tables=tuple(table.gather(slots, rows) for table in tables),
        sampled_rows=sampled,
        logits_rows=ends[sampled] - 1,
        dispatch=dispatch,
    )


def _padded(values: Array, length: int, pad: int, dtype: type[np.integer[Any]]) -> Array:
    if len(values) == length:
        return np.ascontiguousarray(values, dtype=dtype)
    padded: Array = np.full(length, pad, dtype=dtype)
    padded[: len(values)] = values
    return padded
