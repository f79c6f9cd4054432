"""Builds the attention metadata of a step from host values. Called by the model runner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.attention.slots import slot_mapping
from hardpoint_runtime.device import DeviceOps, HostArray

if TYPE_CHECKING:
    from hardpoint_runtime.graphs.static_buffers import GroupBuffers
    from hardpoint_runtime.operations import Operations


class AttentionMetadataBuilder:
    """Makes :class:`AttentionMetadata` for the layers of one KV cache group.

    A plugin whose attention needs more overrides :meth:`build`, and :meth:`build_for_graph` where
    its attention supports FULL graphs, and calls super(). Whatever is built holds what it is given
    of R rows and T tokens; nothing behind them is read. Of ``operations``, ``slot_mapping`` finds
    slots that are not given.
    """

    def __init__(
        self, device: DeviceOps, block_size: int, operations: Operations | None = None
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.slot_mapping = slot_mapping if operations is None else operations.slot_mapping

    def build(
        self,
        *,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: HostArray,
        slots: HostArray | None,
        positions: HostArray,
        num_reqs: int | None = None,
        num_tokens: int | None = None,
    ) -> AttentionMetadata:
        """Return the metadata of one step.

        ``seq_lens`` has R values (padding rows: 0) and ``query_start`` R + 1; ``slots`` and
        ``positions`` have T values (padding tokens: slot -1). Slots that are None are found on the
        device, where block table and positions say. ``num_reqs`` and ``num_tokens`` are the real
        counts; left out, nothing is padding. Only the first R rows of ``block_table``, and
        of these only the columns in use, are read. The values are copied: the caller may change its
        arrays afterwards. Raises ValueError if the lengths contradict each other.
        """
        starts, lens = tuple(map(int, query_start)), tuple(map(int, seq_lens))
        rows = len(lens)
        num_reqs = rows if num_reqs is None else num_reqs
        num_tokens = starts[-1] if num_tokens is None else num_tokens
        host_slots = _host_slots(slots, len(positions), num_tokens)
        _check(starts, lens, len(host_slots), len(positions), num_reqs, num_tokens)
        max_seq = max(lens, default=0)
        columns = -(-max_seq // self.block_size)
        table = _rows(block_table, rows, columns)
        written = np.flatnonzero(host_slots >= 0)
        all_written = len(written) == len(host_slots)
        max_query = _max_query(starts)
        starts_device = self.device.to_device(starts, torch.int32)
        table_device = self.device.to_device(table, torch.int32)
        positions_device = self.device.to_device(positions, torch.int64)
        if slots is None:
            device_slots = self.slot_mapping(
                table_device,
                starts_device,
                positions_device,
                block_size=self.block_size,
                max_query=max_query,
            )
            write_slots = device_slots[:num_tokens]
        else:
            device_slots = write_slots = self.device.to_device(host_slots, torch.int64)
            if not all_written:
                write_slots = self.device.to_device(host_slots[written], torch.int64)
        return AttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            block_size=self.block_size,
            max_query=max_query,
            max_seq=max_seq,
            query_start=starts,
            seq_lens=lens,
            host_block_table=table,
            query_start_device=starts_device,
            seq_lens_device=self.device.to_device(lens, torch.int32),
            block_table=table_device,
            slots=device_slots,
            positions=positions_device,
            write_rows=None if all_written else self.device.to_device(written, torch.int64),
            write_slots=write_slots,
        )

    def build_for_graph(
        self,
        buffers: GroupBuffers,
        *,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: HostArray,
        slots: HostArray | None,
        positions: HostArray,
        num_reqs: int,
        num_tokens: int,
        max_query: int,
    ) -> AttentionMetadata:
        """Write one step into the static buffers of a FULL graph; return its metadata, whose device
        tensors they are. Called by the runner before a capture and before each replay.

        ``max_query`` is the most tokens that a row of any batch of the graph has; ``buffers`` are
        of R rows and T tokens. The rest as in :meth:`build`. Raises ValueError also for values of
        other sizes than the buffers'.
        """
        starts, lens = tuple(map(int, query_start)), tuple(map(int, seq_lens))
        host_slots = _host_slots(slots, len(positions), num_tokens)
        _check(starts, lens, len(host_slots), len(positions), num_reqs, num_tokens)
        rows, columns = buffers.block_table.shape
        if (len(lens), len(host_slots)) != (rows, len(buffers.slots)):
            raise ValueError(
                f"{len(lens)} rows and {len(host_slots)} tokens for a graph of {rows} rows and "
                f"{len(buffers.slots)} tokens: inputs are padded before their metadata is built"
            )
        table = np.zeros((len(lens), columns), dtype=np.int32)
        used = -(-max(lens, default=0) // self.block_size)
        table[:, :used] = _rows(block_table, len(lens), used)
        for target, values in (
            (buffers.query_start, np.asarray(starts, dtype=np.int32)),
            (buffers.seq_lens, np.asarray(lens, dtype=np.int32)),
            (buffers.block_table, table),
            (buffers.positions, np.asarray(positions, dtype=np.int64)),
        ):
            self.device.write(target, values)
        if slots is None:
            self.slot_mapping(
                buffers.block_table,
                buffers.query_start,
                buffers.positions,
                block_size=self.block_size,
                max_query=_max_query(starts),
                out=buffers.slots,
            )
        else:
            self.device.write(buffers.slots, host_slots)
        return AttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            block_size=self.block_size,
            max_query=max_query,
            max_seq=columns * self.block_size,
            query_start=starts,
            seq_lens=lens,
            host_block_table=table,
            query_start_device=buffers.query_start,
            seq_lens_device=buffers.seq_lens,
            block_table=buffers.block_table,
            slots=buffers.slots,
            positions=buffers.positions,
            write_rows=None,
            write_slots=buffers.slots,
            fixed=True,
        )

    def build_for_draft(
        self, metadata: AttentionMetadata, *, slots: HostArray | None, block_table: HostArray
    ) -> AttentionMetadata:
        """Return the metadata of the step in which each real row of ``metadata`` has one token
        more, whose cache slots are ``slots`` [n]. Called by a drafter that drafts one by one.
        """
        lens = [length + 1 for length in metadata.seq_lens[: metadata.num_reqs]]
        return self.build(
            query_start=range(len(lens) + 1),
            seq_lens=lens,
            block_table=block_table,
            slots=slots,
            positions=[length - 1 for length in lens],
        )

    def with_block_table(
        self, metadata: AttentionMetadata, *, block_table: HostArray, slots: HostArray | None
    ) -> AttentionMetadata:
        """Return the same step over the blocks of another KV cache group of equal block size."""
        return self.build(
            query_start=metadata.query_start,
            seq_lens=metadata.seq_lens,
            block_table=block_table,
            slots=slots,
            positions=_positions(metadata),
            num_reqs=metadata.num_reqs,
            num_tokens=metadata.num_tokens,
        )


def _host_slots(slots: HostArray | None, tokens: int, num_tokens: int) -> np.ndarray[Any, Any]:
    """Return what the host knows: of slots that the device finds, only which are written."""
    if slots is not None:
        return np.asarray(slots, dtype=np.int64)
    return np.where(np.arange(tokens) < num_tokens, 0, -1)


def _max_query(starts: Sequence[int]) -> int:
    return max((after - before for before, after in itertools.pairwise(starts)), default=0)


def _positions(metadata: AttentionMetadata) -> np.ndarray[Any, Any]:
    positions = np.zeros(metadata.padded_tokens, dtype=np.int64)
    for (start, stop), length in zip(
        itertools.pairwise(metadata.query_start), metadata.seq_lens, strict=True
    ):
        positions[start:stop] = np.arange(length - (stop - start), length)
    return positions


def _rows(block_table: Any, rows: int, columns: int) -> np.ndarray[Any, Any]:
    table = np.zeros((rows, columns), dtype=np.int32)
    if isinstance(block_table, np.ndarray | torch.Tensor):
        table[:] = block_table[:rows, :columns]
        return table
    for row, ids in enumerate(block_table[:rows]):
        table[row, : len(ids[:columns])] = ids[:columns]
    return table


def _check(
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    slots: int,
    positions: int,
    num_reqs: int,
    num_tokens: int,
) -> None:
    queries = [after - before for before, after in itertools.pairwise(starts)]
    if len(starts) != len(lens) + 1 or starts[0] != 0 or min(queries, default=0) < 0:
        raise ValueError(f"query_start {starts} does not cut {len(lens)} rows")
    if any(query > length for query, length in zip(queries, lens, strict=True)):
        raise ValueError(f"query_start {starts} gives a row more tokens than its length {lens}")
    if any(lens[num_reqs:]) or starts[-1] != num_tokens:
        raise ValueError(
            f"padding is not inert: {num_reqs} rows and {num_tokens} tokens are real, but lengths "
            f"are {lens} and query_start ends at {starts[-1]}"
        )
    if slots != positions or slots < num_tokens:
        raise ValueError(f"{slots} slots and {positions} positions for {num_tokens} tokens")
