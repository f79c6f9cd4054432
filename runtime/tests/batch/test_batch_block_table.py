from __future__ import annotations

import random

import numpy as np
import pytest
from hardpoint_runtime.batch.block_table import (
    BlockTable,
    BlockTableError,
    context_parallel_slots,
    table_width,
)
from hardpoint_runtime.batch.columns import Columns


def make_table(**more):
    more = {"group": 0, "block_size": 4, "num_blocks": 100, "max_model_len": 32, **more}
    columns = Columns([], 3)
    return columns, BlockTable(columns, **more)


@pytest.mark.parametrize(
    ("length", "block", "width"),
    [(1, 16, 8), (128, 16, 8), (129, 16, 16), (8192, 16, 512), (5, 1, 128)],
)
def test_rows_are_as_wide_as_the_longest_request_in_steps_of_128_tokens(length, block, width):
    assert table_width(length, block) == width


def test_against_a_plain_dictionary():
    rng = random.Random(7)
    columns, table = make_table(max_model_len=128)
    model: dict[int, list[int]] = {}
    for _ in range(3000):
        slot = rng.choice(sorted(model)) if model else None
        match rng.randrange(4):
            case 0 if len(model) < 8:
                model[columns.take()] = []
            case 1 if slot is not None:
                ids = [rng.randrange(100) for _ in range(rng.randrange(4))]
                if len(model[slot]) + len(ids) > table.width:
                    with pytest.raises(BlockTableError):
                        table.check("x", table.count(slot), ids)
                else:
                    table.check("x", table.count(slot), ids)
                    table.append(slot, ids)
                    model[slot] += ids
            case 2 if slot is not None:
                table.clear(slot)
                model[slot] = []
            case 3 if slot is not None:
                columns.free(slot)
                del model[slot]
        assert {slot: table.row(slot).tolist() for slot in model} == model
        held = columns["blocks.0"]
        for slot in range(columns.capacity):
            assert held[slot, len(model.get(slot, ())) :].any() == False  # noqa: E712


def test_too_many_blocks_name_the_request_and_the_room():
    _, table = make_table()
    with pytest.raises(
        BlockTableError, match=r"request 'r7': 3 more blocks in KV cache group 0, .* room for 2"
    ):
        table.check("r7", 30, (1, 2, 3))


@pytest.mark.parametrize("block", [-1, 100])
def test_a_block_outside_the_cache_names_the_request(block):
    _, table = make_table()
    with pytest.raises(
        BlockTableError, match=rf"request 'r7': block {block} .* outside the cache of 100"
    ):
        table.check("r7", 0, (block,))


def test_groups_have_tables_of_their_own_block_size(make_requests, new_request):
    requests = make_requests(block_sizes=(4, 8))
    requests.add(new_request(prompt=range(1, 11), blocks=((11, 12, 13), (21, 22))))
    slot = np.array([requests.slot_of("a")])
    small, large = requests.block_tables.tables
    assert small.gather(slot).tolist() == [[11, 12, 13]]
    assert large.gather(slot).tolist() == [[21, 22]]
    rows, positions = np.zeros(10, dtype=np.int64), np.arange(10)
    assert small.slot_mapping(slot, rows, positions).tolist() == [
        *range(44, 48),
        *range(48, 52),
        52,
        53,
    ]
    assert large.slot_mapping(slot, rows, positions).tolist() == [*range(168, 176), 176, 177]


def test_a_request_brings_blocks_for_every_group(make_requests, new_request, step, apply):
    requests = make_requests(block_sizes=(4, 8))
    with pytest.raises(BlockTableError, match=r"request 'a' brings blocks for 1 .* there are 2"):
        apply(requests, step([(new_request(), 3)]))
    assert len(requests) == 0


def test_a_block_can_be_split_for_the_kernel():
    columns, table = make_table(block_size=8, split=2)
    slot = columns.take()
    table.append(slot, (3, 5))
    assert table.block_size == 4
    assert table.row(slot).tolist() == [6, 7, 10, 11]
    with pytest.raises(BlockTableError, match="cannot be split into 3"):
        make_table(block_size=8, split=3)


def test_padding_rows_are_null_blocks_and_only_used_columns_are_gathered():
    columns, table = make_table()
    first, second = columns.take(), columns.take()
    table.append(first, (9,))
    table.append(second, (4, 5))
    gathered = table.gather(np.array([second, first]), 4)
    assert gathered.tolist() == [[4, 5], [9, 0], [0, 0], [0, 0]]


def brute_force(table, row, position, block_size, size, rank, interleave):
    """Deal the tokens of each virtual block one by one."""
    start = position // (block_size * size) * (block_size * size)
    packed = dict.fromkeys(range(size), 0)
    for at in range(start, position + 1):
        owner = ((at - start) // interleave) % size
        place = packed[owner]
        packed[owner] += 1
    block = table[row][position // (block_size * size)]
    return block * block_size + place if owner == rank else -1


def test_slot_mapping_against_brute_force():
    rng = random.Random(3)
    for _ in range(60):
        size, interleave = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
        block_size = interleave * rng.choice([1, 2, 4])
        table = np.array([[rng.randrange(1, 50) for _ in range(40)] for _ in range(3)])
        count = rng.randrange(1, 30)
        rows = np.array([rng.randrange(3) for _ in range(count)])
        positions = np.array([rng.randrange(40 * block_size) for _ in range(count)])
        every = []
        for rank in range(size):
            found = context_parallel_slots(
                table, rows, positions,
                block_size=block_size, size=size, rank=rank, interleave=interleave,
            )  # fmt: skip
            assert found.tolist() == [
                brute_force(table, row, int(at), block_size, size, rank, interleave)
                for row, at in zip(rows, positions, strict=True)
            ]
            every.append(found)
        assert (np.sum(np.array(every) >= 0, axis=0) == 1).all()  # exactly one rank keeps a token


def test_plain_slot_mapping_is_context_parallelism_of_one():
    columns, table = make_table()
    slot = columns.take()
    table.append(slot, (3, 9, 4))
    positions = np.arange(12)
    rows = np.zeros(12, dtype=np.int64)
    plain = table.slot_mapping(np.array([slot]), rows, positions)
    one = context_parallel_slots(
        columns["blocks.0"], rows + slot, positions, block_size=4, size=1, rank=0
    )
    assert plain.tolist() == one.tolist() == [*range(12, 16), *range(36, 40), *range(16, 20)]
