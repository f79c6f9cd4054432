"""Static buffers: the device memory that every replayed graph reads its batch from.

One set serves all graphs of a runner: a batch of n tokens and r rows is their beginning. What lies
behind a batch in them belongs to earlier ones and is read by no graph of its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

if TYPE_CHECKING:
    from hardpoint_runtime.device import DeviceOps


@frozen(kw_only=True, eq=False)
class GroupBuffers:
    """What attention of one KV cache group reads: of R rows and T tokens, on the device.

    ``query_start`` int32 [R + 1], ``seq_lens`` int32 [R], ``block_table`` int32 [R, C] with C
    blocks of the longest sequence, ``slots`` and ``positions`` int64 [T].
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


@frozen(kw_only=True, eq=False)
class StaticBatch:
    """The buffers of one shape of batch: ``token_ids`` and ``positions`` int64 [T]; ``groups`` by
    KV cache group, empty for graphs that hold no attention.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBuffers, ...] = ()


class StaticBuffers:
    """All static buffers of one runner, for up to ``tokens`` tokens of ``rows`` requests;
    ``columns`` are the blocks of the longest sequence by KV cache group. ``whole`` is all of it.
    """

    def __init__(
        self, device: DeviceOps, *, tokens: int, rows: int, columns: Sequence[int]
    ) -> None:
        def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.device)

        self.whole = StaticBatch(
            token_ids=make(tokens, dtype=torch.int64),
            positions=(positions := make(tokens, dtype=torch.int64)),
            groups=tuple(
                GroupBuffers(
                    query_start=make(rows + 1, dtype=torch.int32),
                    seq_lens=make(rows, dtype=torch.int32),
                    block_table=make(rows, width, dtype=torch.int32),
                    slots=make(tokens, dtype=torch.int64),
                    positions=positions,
                )
                for width in columns
            ),
        )

    def batch(self, tokens: int, rows: int | None) -> StaticBatch:
        """Return the buffers of ``tokens`` tokens and ``rows`` requests; None: without groups."""
        whole = self.whole
        return StaticBatch(
            token_ids=whole.token_ids[:tokens],
            positions=whole.positions[:tokens],
            groups=()
            if rows is None
            else tuple(
                GroupBuffers(
                    query_start=group.query_start[: rows + 1],
                    seq_lens=group.seq_lens[:rows],
                    block_table=group.block_table[:rows],
                    slots=group.slots[:tokens],
                    positions=whole.positions[:tokens],
                )
                for group in whole.groups
            ),
        )
