"""Where a step's tokens are cached, found on the device: the built-in ``slot_mapping``.

Runners find it on the host (:mod:`hardpoint_runtime.batch.block_table`) and send it along, unless a
kernel is offered for this operation: block table and positions are on the device in any case.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SlotMapping(Protocol):
    """Maps the tokens of a step to cache slots."""

    def __call__(
        self,
        table: Tensor,
        query_start: Tensor,
        positions: Tensor,
        *,
        block_size: int,
        max_query: int,
        size: int = 1,
        rank: int = 0,
        interleave: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`slot_mapping`."""


def slot_mapping(
    table: Tensor,
    query_start: Tensor,
    positions: Tensor,
    *,
    block_size: int,
    max_query: int,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return the cache slot int64 [T] of each token, in ``out`` if given; -1 for padding tokens and
    for those that another context-parallel rank keeps.

    ``table`` int32 [R, C], ``query_start`` int32 [R + 1], ``positions`` int64 [T], all on the
    device; a row has at most about ``max_query`` tokens (a guess, for the speed alone). ``size``,
    ``rank`` and ``interleave`` as in
    :func:`hardpoint_runtime.batch.block_table.context_parallel_slots`.
    """
    del max_query
    slots = torch.full_like(positions, -1) if out is None else out
    if table.numel():
        token = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        row = torch.searchsorted(query_start[1:], token, right=True)
        offset = positions % (block_size * size)
        block = table[row.clamp(max=len(table) - 1), positions // (block_size * size)].long()
        mine = (offset // interleave % size == rank) & (row < len(table))
        local = offset // (interleave * size) * interleave + offset % interleave
        slots.copy_(torch.where(mine, block * block_size + local, -1))
    else:
        slots.fill_(-1)
    return slots
