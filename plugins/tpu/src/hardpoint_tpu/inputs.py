"""One piece of a step as static arrays: token ids in tiles, where each tile is, rows to sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from hardpoint_tpu.buckets import Shape
from hardpoint_tpu.requests import Ints, Requests


@frozen(kw_only=True, eq=False)
class PieceInputs:
    """The inputs of one piece, padded to ``shape``: N tiles of B tokens.

    ``token_ids`` int32 [N * B], 0 where there is none; ``tables`` int32 [N, columns]; ``starts``
    and ``counts`` int32 [N]: where a tile's first token is and how many are real, 0 for padding.
    ``sampled`` are the requests whose next token can be chosen, ``rows`` int32 [R] the places of
    their last tokens, padded with 0.
    """

    shape: Shape
    token_ids: Ints
    tables: Ints
    starts: Ints
    counts: Ints
    sampled: tuple[str, ...]
    rows: Ints


def build_piece(
    requests: Requests, shape: Shape, req_ids: Sequence[str], counts: Sequence[int], rows: int
) -> PieceInputs:
    """Build the piece of ``counts[i]`` tokens of request i, each beginning a tile; ``rows`` is the
    row bucket of the selection.
    """
    slots = requests.slots(req_ids)
    lengths = np.asarray(counts, np.int64)
    computed = requests.columns["num_computed"][slots].astype(np.int64)
    tiles_of = -(-lengths // shape.tile)
    owner = np.repeat(np.arange(len(slots)), tiles_of)
    first = np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    offset = (np.arange(len(owner)) - first) * shape.tile
    starts, held = np.zeros(shape.tiles, np.int32), np.zeros(shape.tiles, np.int32)
    starts[: len(owner)] = computed[owner] + offset
    held[: len(owner)] = np.minimum(lengths[owner] - offset, shape.tile)
    tables = np.zeros((shape.tiles, requests.blocks.shape[1]), np.int32)
    tables[: len(owner)] = requests.blocks[slots[owner]]
    due = np.flatnonzero(requests.due(slots, lengths)).tolist()
    last = (np.cumsum(tiles_of) - tiles_of) * shape.tile + lengths - 1
    places = np.zeros(rows, np.int32)
    places[: len(due)] = last[due]
    return PieceInputs(
        shape=shape,
        token_ids=_token_ids(requests, shape, slots[owner], starts, held),
        tables=tables,
        starts=starts,
        counts=held,
        sampled=tuple(req_ids[index] for index in due),
        rows=places,
    )


def _token_ids(
    requests: Requests, shape: Shape, slots: NDArray[np.int64], starts: Ints, counts: Ints
) -> Ints:
    tokens = np.zeros((shape.tiles, shape.tile), np.int32)
    used = len(slots)
    places = starts[:used, None] + np.arange(shape.tile)
    real = np.arange(shape.tile) < counts[:used, None]
    found = requests.tokens[slots[:, None], np.minimum(places, requests.max_model_len - 1)]
    tokens[:used] = np.where(real, found, 0)
    return tokens.reshape(-1)
