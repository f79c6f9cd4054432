"""Static buffers: the device memory that every replayed graph reads its batch from.

One set serves all graphs of a runner: a batch of n tokens and r rows is their beginning. What lies
behind a batch in them belongs to earlier ones and is read by no graph of its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import field, fields, frozen

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

    def of(self, tokens: int, rows: int) -> GroupBuffers:
        """Return the beginning that belongs to a batch."""
        return GroupBuffers(
            query_start=self.query_start[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_table=self.block_table[:rows],
            slots=self.slots[:tokens],
            positions=self.positions[:tokens],
        )


@frozen(kw_only=True, eq=False)
class StaticBatch:
    """The buffers of one shape of batch: ``token_ids`` and ``positions`` int64 [T]; ``carried`` is
    what the pipeline stage before hands over, by name, each [T, ...]; ``groups`` by KV cache group,
    empty for graphs that hold no attention, in which no row has more than ``max_query`` tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    carried: Mapping[str, torch.Tensor] = field(factory=dict)
    groups: tuple[GroupBuffers, ...] = ()
    max_query: int = 1


class StaticBuffers:
    """All static buffers of one runner, for up to ``tokens`` tokens of ``rows`` requests.

    ``columns`` are the blocks of the longest sequence by KV cache group; ``carried`` the shapes of
    what the stage before hands over, of ``dtype``. ``whole`` is all of it as one batch.
    """

    def __init__(
        self,
        device: DeviceOps,
        *,
        tokens: int,
        rows: int,
        columns: Sequence[int],
        carried: Mapping[str, Sequence[int]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def make(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=of, device=device.device)

        positions = make(tokens, of=torch.int64)
        self.whole = StaticBatch(
            token_ids=make(tokens, of=torch.int64),
            positions=positions,
            carried={name: make(*shape, of=dtype) for name, shape in (carried or {}).items()},
            groups=tuple(
                GroupBuffers(
                    query_start=make(rows + 1, of=torch.int32),
                    seq_lens=make(rows, of=torch.int32),
                    block_table=make(rows, width, of=torch.int32),
                    slots=make(tokens, of=torch.int64),
                    positions=positions,
                )
                for width in columns
            ),
        )

    def batch(self, tokens: int, rows: int | None, max_query: int) -> StaticBatch:
        """Return the buffers of ``tokens`` tokens and ``rows`` requests, each of ``max_query``
        tokens at most; None: without groups.
        """
        whole = self.whole
        return StaticBatch(
            token_ids=whole.token_ids[:tokens],
            positions=whole.positions[:tokens],
            carried={name: tensor[:tokens] for name, tensor in whole.carried.items()},
            groups=() if rows is None else tuple(g.of(tokens, rows) for g in whole.groups),
            max_query=max_query,
        )

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every buffer with a name for messages."""
        yield "token_ids", self.whole.token_ids
        yield "positions", self.whole.positions
        yield from self.whole.carried.items()
        for index, group in enumerate(self.whole.groups):
            for each in fields(GroupBuffers):
                yield f"{each.name} of KV cache group {index}", getattr(group, each.name)
