"""Attention metadata from host values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.device import HostDeviceOps

BUILDER = AttentionMetadataBuilder(HostDeviceOps(), 4)


def values(**changes):
    return {
        "query_start": [0, 2, 7, 10],
        "seq_lens": [2, 9, 3],
        "block_table": [[5], [1, 2, 3], [7]],
        "slots": list(range(10)),
        "positions": [0, 1, 4, 5, 6, 7, 8, 0, 1, 2],
    } | changes


def test_figures_of_a_step():
    metadata = BUILDER.build(**values())
    assert (metadata.num_reqs, metadata.num_tokens, metadata.padded_tokens) == (3, 10, 10)
    assert (metadata.max_query, metadata.max_seq) == (5, 9)
    assert metadata.query_start_device.tolist() == [0, 2, 7, 10]
    assert metadata.seq_lens_device.tolist() == [2, 9, 3]
    assert metadata.block_table.tolist() == [[5, 0, 0], [1, 2, 3], [7, 0, 0]]
    assert metadata.write_rows is None
    assert metadata.write_slots.tolist() == list(range(10))
    assert metadata.block_table.dtype == metadata.query_start_device.dtype == torch.int32
    assert metadata.slots.dtype == metadata.positions.dtype == torch.int64


def test_metadata_of_a_padded_step_has_the_padded_size():
    metadata = BUILDER.build(
        **values(
            query_start=[0, 2, 7, 10, 10],
            seq_lens=[2, 9, 3, 0],
            block_table=[[5], [1, 2, 3], [7], []],
            slots=[*range(10), -1, -1],
            positions=[0, 1, 4, 5, 6, 7, 8, 0, 1, 2, 0, 0],
        ),
        num_reqs=3,
        num_tokens=10,
    )
    assert metadata.padded_tokens == len(metadata.positions) == 12
    assert len(metadata.seq_lens) == len(metadata.block_table) == 4
    assert metadata.write_rows.tolist() == list(range(10))
    assert metadata.write_slots.tolist() == list(range(10))


def test_nothing_beyond_the_rows_and_columns_in_use_is_read():
    whole = np.full((64, 100), -(2**31), dtype=np.int32)
    whole[0, :1], whole[1, :3], whole[2, :1] = [5], [1, 2, 3], [7]
    metadata = BUILDER.build(**values(block_table=whole))
    assert metadata.block_table.shape == (3, 3)


def test_the_callers_arrays_may_change_afterwards():
    table, slots = np.array([[5, 0, 0], [1, 2, 3], [7, 0, 0]], dtype=np.int32), np.arange(10)
    positions = torch.arange(10)
    metadata = BUILDER.build(**values(block_table=table, slots=slots, positions=positions))
    table[:], slots[:], positions[:] = 9, 9, 9
    assert metadata.block_table[1].tolist() == [1, 2, 3]
    assert metadata.slots.tolist() == metadata.positions.tolist() == list(range(10))


@pytest.mark.parametrize(
    "changes",
    [
        {"query_start": [0, 2, 7]},
        {"query_start": [1, 2, 7, 10]},
        {"query_start": [0, 7, 2, 10]},
        {"seq_lens": [1, 9, 3]},
        {"slots": list(range(9))},
        {"positions": list(range(9))},
        {"num_reqs": 2},
        {"num_tokens": 9},
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match=r"row|slots|padding"):
        BUILDER.build(**values(**changes))


def test_a_step_without_tokens():
    metadata = BUILDER.build(query_start=[0], seq_lens=[], block_table=[], slots=[], positions=[])
    assert (metadata.num_reqs, metadata.max_query, metadata.max_seq) == (0, 0, 0)
