"""Attention metadata from host values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.static_buffers import StaticBuffers

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


# For graphs.


@pytest.fixture
def buffers():
    """Of 5 rows and 14 tokens, full of what an earlier batch left."""
    made = StaticBuffers(HostDeviceOps(), tokens=20, rows=8, columns=[6])
    for _, tensor in made.named():
        tensor.fill_(99)
    return made


def padded(**changes):
    return values(
        query_start=[0, 2, 7, 10, 10, 10],
        seq_lens=[2, 9, 3, 0, 0],
        block_table=[[5], [1, 2, 3], [7], [], []],
        slots=[*range(10), -1, -1, -1, -1],
        positions=[0, 1, 4, 5, 6, 7, 8, 0, 1, 2, 0, 0, 0, 0],
        num_reqs=3,
        num_tokens=10,
    ) | {"max_query": 14, **changes}


def test_the_metadata_of_a_graph_is_its_static_buffers(buffers):
    group = buffers.batch(14, 5, 14).groups[0]
    metadata = BUILDER.build_for_graph(group, **padded())
    assert metadata.fixed
    assert metadata.query_start_device is group.query_start
    assert metadata.block_table is group.block_table
    assert metadata.slots is metadata.write_slots is group.slots
    assert metadata.write_rows is None
    assert group.query_start.tolist() == [0, 2, 7, 10, 10, 10]
    assert group.seq_lens.tolist() == [2, 9, 3, 0, 0]
    assert group.block_table[1].tolist() == [1, 2, 3, 0, 0, 0]
    assert group.slots.tolist() == [*range(10), -1, -1, -1, -1]
    assert group.positions.tolist() == [0, 1, 4, 5, 6, 7, 8, 0, 1, 2, 0, 0, 0, 0]
    assert (metadata.max_query, metadata.max_seq) == (14, 24), "those of any batch of the graph"
    assert (metadata.num_reqs, metadata.num_tokens, metadata.padded_tokens) == (3, 10, 14)
    behind = buffers.whole.groups[0]
    assert (behind.slots[14:] == 99).all()
    assert (behind.seq_lens[5:] == 99).all()


def test_the_next_batch_of_a_graph_leaves_nothing_of_the_last(buffers):
    group = buffers.batch(14, 5, 14).groups[0]
    BUILDER.build_for_graph(group, **padded())
    BUILDER.build_for_graph(
        group,
        **padded(
            query_start=[0, 1, 1, 1, 1, 1],
            seq_lens=[1, 0, 0, 0, 0],
            block_table=[[4], [], [], [], []],
            slots=[3] + [-1] * 13,
            positions=[0] * 14,
            num_reqs=1,
            num_tokens=1,
        ),
    )
    assert group.block_table.tolist() == [[4, 0, 0, 0, 0, 0]] + [[0] * 6] * 4
    assert group.seq_lens.tolist() == [1, 0, 0, 0, 0]
    assert group.slots.tolist() == [3] + [-1] * 13


def where_the_table_says(metadata):
    """Slots of the real tokens, by the rows of the metadata."""
    found = []
    for row, (start, stop) in enumerate(itertools.pairwise(metadata.query_start)):
        for position in range(metadata.seq_lens[row] - (stop - start), metadata.seq_lens[row]):
            block = int(metadata.host_block_table[row, position // 4])
            found.append(block * 4 + position % 4)
    return found


def test_slots_that_are_not_given_are_found_on_the_device(buffers):
    given = padded(slots=None)
    most = given.pop("max_query")
    eager = BUILDER.build(**given)
    expected = [*where_the_table_says(eager), -1, -1, -1, -1]
    assert expected[:3] == [20, 21, 8], "the second row's first new token is its fifth"
    assert eager.slots.tolist() == expected
    assert eager.write_rows.tolist() == list(range(10))
    assert eager.write_slots.tolist() == expected[:10]
    group = buffers.batch(14, 5, 14).groups[0]
    metadata = BUILDER.build_for_graph(group, max_query=most, **given)
    assert metadata.slots is metadata.write_slots is group.slots
    assert group.slots.tolist() == expected
    assert (buffers.whole.groups[0].slots[14:] == 99).all()
    whole = BUILDER.build(**values(slots=None))
    assert whole.write_rows is None
    assert whole.slots.tolist() == whole.write_slots.tolist() == expected[:10]
    assert BUILDER.build(**values(slots=[7] * 10)).slots.tolist() == [7] * 10, "given ones count"


def test_a_step_of_padding_alone_has_no_slot():
    metadata = BUILDER.build(
        query_start=[0, 0], seq_lens=[0], block_table=[[]], slots=None, positions=[0, 0],
        num_reqs=0, num_tokens=0,
    )  # fmt: skip
    assert metadata.slots.tolist() == [-1, -1]


@pytest.mark.parametrize(("tokens", "rows"), [(13, 5), (14, 4), (14, 1)])
def test_a_batch_of_another_shape_than_the_graph_is_refused(buffers, tokens, rows):
    group = buffers.batch(tokens, rows, 14).groups[0]
    with pytest.raises(ValueError, match=r"5 rows and 14 tokens for a graph of"):
        BUILDER.build_for_graph(group, **padded())


# The same requests, otherwise.


def test_the_metadata_of_a_draft_has_one_token_more_of_each_row():
    metadata = build_padded()
    draft = BUILDER.build_for_draft(metadata, slots=[22, 13, 31], block_table=[[5], [1, 2, 3], [7]])
    assert draft.query_start == (0, 1, 2, 3)
    assert draft.seq_lens == (3, 10, 4)
    assert draft.positions.tolist() == [2, 9, 3]
    assert draft.slots.tolist() == [22, 13, 31]
    assert (draft.max_query, draft.num_reqs, draft.padded_tokens) == (1, 3, 3)


def test_the_same_step_over_the_blocks_of_another_group():
    metadata = build_padded()
    other = BUILDER.with_block_table(
        metadata,
        block_table=[[9], [8, 6, 4], [2], [], []],
        slots=[*range(100, 110), -1, -1, -1, -1],
    )
    assert other.host_block_table.tolist()[1] == [8, 6, 4]
    assert other.slots.tolist() == [*range(100, 110), -1, -1, -1, -1]
    assert other.positions.tolist() == metadata.positions.tolist()
    assert (other.query_start, other.seq_lens) == (metadata.query_start, metadata.seq_lens)
    assert (other.num_reqs, other.num_tokens) == (3, 10)


def build_padded():
    given = padded()
    del given["max_query"]
    return BUILDER.build(**given)
