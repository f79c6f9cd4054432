"""How the plain torch attention cuts one step: rows with one query token together, others alone.

Made once a step and shared by all layers with the same window and dtype. Everything here is decided
from host values; the device gets ready gather indices and masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from hardpoint_runtime.attention.metadata import AttentionMetadata

WASTE = 512
"""Padded positions that a group of single-token rows may read in vain before it is split.

Reading one costs about a tenth of a microsecond in each layer, another group about fifty.
"""

TILE = 256
"""Query tokens that are computed together where there is a mask; bounds the memory of scores."""

Slots = torch.Tensor | slice
"""Rows of the flat cache: gathered by index, or a run that needs no copy."""


@frozen(kw_only=True, eq=False)
class SingleTokens:
    """Rows with one query token each, B of them, padded to L positions.

    ``tokens``: their query tokens [B], on the device. ``slots``: B * L rows of the flat cache;
    positions past a row's end repeat its first one, so that nothing unwritten is ever read.
    ``mask``: [B, 1, 1, L], 0 or -inf; None if no row is padded.
    """

    tokens: torch.Tensor
    rows: int
    length: int
    slots: Slots
    mask: torch.Tensor | None


@frozen(kw_only=True, eq=False)
class Tile:
    """Query tokens ``start:stop`` of the step against the first ``keys`` positions gathered;
    ``mask`` [stop - start, keys], None: causal from the first position on.
    """

    start: int
    stop: int
    first_key: int
    keys: int
    mask: torch.Tensor | None


@frozen(kw_only=True, eq=False)
class ManyTokens:
    """One row with several query tokens: its cache rows, and the tiles of its queries."""

    slots: Slots
    tiles: tuple[Tile, ...]


@frozen(kw_only=True, eq=False)
class AttentionPlan:
    """All rows of a step. ``complete``: one group holds every token of the step, in order.
    ``padded``: some tokens belong to no row.
    """

    singles: tuple[SingleTokens, ...]
    many: tuple[ManyTokens, ...]
    complete: bool
    padded: bool


def plan_attention(
    metadata: AttentionMetadata, window: int | None, dtype: torch.dtype
) -> AttentionPlan:
    """Cut the step. ``window`` is in tokens, the query's own included; None: all."""
    starts = metadata.query_start
    single, many = [], []
    for row in range(metadata.num_reqs):
        queries = starts[row + 1] - starts[row]
        if queries == 1:
            single.append(row)
        elif queries > 1:
            many.append(row)
    groups = tuple(
        _single_tokens(metadata, rows, window, dtype) for rows in _groups(metadata, single, window)
    )
    masks = _Masks(metadata, many, window, dtype)
    padded = metadata.num_tokens < metadata.padded_tokens
    return AttentionPlan(
        singles=groups,
        many=tuple(_many_tokens(metadata, row, window, masks) for row in many),
        complete=len(groups) == 1 and not many and not padded,
        padded=padded,
    )


def _groups(
    metadata: AttentionMetadata, rows: Sequence[int], window: int | None
) -> list[list[int]]:
    """Group rows of similar length. Rows of a group stay in the order of the step."""
    lengths = {row: _span(metadata.seq_lens[row], window) for row in rows}
    order = sorted(rows, key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for place, row in enumerate(order):
        if groups and (lengths[groups[-1][0]] - lengths[row]) * (len(order) - place) <= WASTE:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def _single_tokens(
    metadata: AttentionMetadata, rows: Sequence[int], window: int | None, dtype: torch.dtype
) -> SingleTokens:
    ends = np.array([metadata.seq_lens[row] for row in rows])
    spans = np.array([_span(int(end), window) for end in ends])
    length = int(spans.max())
    steps = np.arange(length)
    inside = steps < spans[:, None]
    positions = np.where(inside, (ends - spans)[:, None] + steps, (ends - spans)[:, None])
    slots = _slots(metadata, np.array(rows)[:, None], positions)
    device = metadata.slots.device
    mask = None
    if not inside.all():
        bias = np.where(inside, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        mask = torch.from_numpy(bias).to(device=device, dtype=dtype)
    tokens = [metadata.query_start[row] for row in rows]
    return SingleTokens(
        tokens=torch.tensor(tokens, device=device),
        rows=len(rows),
        length=length,
        slots=_run_or_index(slots.reshape(-1), device),
        mask=mask,
    )


def _many_tokens(
    metadata: AttentionMetadata, row: int, window: int | None, masks: _Masks
) -> ManyTokens:
    start, stop = metadata.query_start[row], metadata.query_start[row + 1]
    context = metadata.seq_lens[row] - (stop - start)
    first = 0 if window is None else max(0, context - window + 1)
    positions = np.arange(first, metadata.seq_lens[row])
    slots = _slots(metadata, np.full_like(positions, row), positions)
    if context == 0 and window is None:
        tiles = [Tile(start=start, stop=stop, first_key=0, keys=stop - start, mask=None)]
    else:
        tiles = [
            _tile(start, begin, min(begin + TILE, stop), context, first, window, masks)
            for begin in range(start, stop, TILE)
        ]
    return ManyTokens(slots=_run_or_index(slots, metadata.slots.device), tiles=tuple(tiles))


def _tile(
    start: int, begin: int, end: int, context: int, first: int, window: int | None, masks: _Masks
) -> Tile:
    position = context + begin - start
    low = first if window is None else max(first, position - window + 1)
    keys = position + (end - begin) - low
    mask = masks.of(end - begin, keys, position - low)
    return Tile(start=begin, stop=end, first_key=low - first, keys=keys, mask=mask)


class _Masks:
    """Masks of tiles as views of one template: every causal mask is a piece of the same band.

    In a tile whose first query sits ``offset`` keys after the first key, query i sees key j if
    ``offset + i - window < j <= offset + i``. The template has that for the largest offset; a
    smaller one is the same band further left.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        rows: Sequence[int],
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self._largest = max((metadata.seq_lens[row] for row in rows), default=0)
        if window is not None:
            self._largest = min(self._largest, window)
        self._window = window
        self._dtype = dtype
        self._device = metadata.slots.device
        self._template: torch.Tensor | None = None

    def of(self, queries: int, keys: int, offset: int) -> torch.Tensor:
        """Return the mask [queries, keys] of a tile."""
        if self._template is None:
            self._template = self._make()
        left = self._largest - offset
        return self._template[:queries, left : left + keys]

    def _make(self) -> torch.Tensor:
        columns = np.arange(self._largest + TILE) - np.arange(TILE)[:, None]
        seen = columns <= self._largest
        if self._window is not None:
            seen &= columns > self._largest - self._window
        bias = np.where(seen, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(bias).to(device=self._device, dtype=self._dtype)


def _span(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def _slots(metadata: AttentionMetadata, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    blocks = metadata.host_block_table[rows, positions // metadata.block_size].astype(np.int64)
    slots: np.ndarray = blocks * metadata.block_size + positions % metadata.block_size
    return slots


def _run_or_index(slots: np.ndarray, device: torch.device) -> Slots:
    """Return the slots as a slice if they follow each other, which saves the copy."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots).to(device=device)
