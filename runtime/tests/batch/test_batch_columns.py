from __future__ import annotations

import numpy as np
import pytest
from hardpoint_runtime.batch.columns import Column, ColumnError, Columns
from hardpoint_runtime.batch.requests import COUNTS, make_columns
from hardpoint_runtime.sampling.columns import SAMPLING_COLUMNS


def two(capacity=3):
    return Columns(
        [
            Column(name="share", dtype="float32", default=1.0, pad=0.5),
            Column(name="mask", dtype="bool", shape=(4,), default=True, pad=False),
        ],
        capacity,
    )


def test_a_column_without_default_or_pad_cannot_be_declared():
    with pytest.raises(TypeError, match="pad"):
        Column(name="mode", dtype="int32", default=0)
    with pytest.raises(TypeError, match="default"):
        Column(name="mode", dtype="int32", pad=0)


@pytest.mark.parametrize(
    ("dtype", "shape", "default", "pad", "wrong"),
    [
        ("int32", (), 0, 0.5, "pad"),
        ("int8", (), 0, 1000, "pad"),
        ("bool", (), 2, False, "default"),
        ("int32", (2,), 0, (1, 2, 3), "pad"),
        ("int32", (), "many", 0, "default"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(dtype, shape, default, pad, wrong):
    with pytest.raises(ColumnError, match=f"column 'mode': {wrong}"):
        Column(name="mode", dtype=dtype, shape=shape, default=default, pad=pad)


def test_padding_is_by_the_declared_value_for_every_column():
    columns = two()
    first, second = columns.take(), columns.take()
    columns["share"][[first, second]] = 0.25, 0.75
    columns["mask"][second] = [True, False, True, False]
    assert columns.gather("share", [second, first], 4).tolist() == [0.75, 0.25, 0.5, 0.5]
    mask = columns.gather("mask", [second], 3)
    assert mask.tolist() == [[True, False, True, False], [False] * 4, [False] * 4]


def test_every_built_in_column_pads_to_its_declared_value():
    """A new field is padded with all others, or not declared at all."""
    columns = make_columns(8, 2, SAMPLING_COLUMNS)
    slot = columns.take()
    for column in columns.declared:
        padded = columns.gather(column.name, [slot], 3)
        assert padded.dtype == np.dtype(column.dtype)
        assert padded.shape == (3, *column.shape)
        np.testing.assert_array_equal(padded[1:], np.full((2, *column.shape), column.pad))
    assert {column.name for column in (*COUNTS, *SAMPLING_COLUMNS)} < {
        column.name for column in columns.declared
    }


def test_a_gathered_row_is_a_copy():
    columns = two()
    slot = columns.take()
    columns.gather("share", [slot])[0] = 9
    assert columns["share"][slot] == 1.0


def test_the_lowest_free_slot_is_taken_and_a_freed_one_holds_defaults():
    columns = two()
    assert [columns.take(), columns.take(), columns.take()] == [0, 1, 2]
    columns["share"][1] = 0.1
    columns["mask"][1] = False
    columns.free(1)
    assert columns["share"][1] == 1.0
    assert columns["mask"][1].all()
    columns.free(0)
    assert columns.take() == 0
    assert columns.taken == {0, 2}


def test_a_slot_is_freed_once():
    columns = two()
    slot = columns.take()
    columns.free(slot)
    with pytest.raises(ColumnError, match="slot 0 is not in use"):
        columns.free(slot)


def test_the_table_grows_and_keeps_what_it_holds():
    columns = two(capacity=1)
    columns["share"][columns.take()] = 0.3
    slot = columns.take()
    assert (slot, columns.capacity) == (1, 2)
    assert columns["share"].tolist() == pytest.approx([0.3, 1.0])
    assert [columns.take(), columns.take()] == [2, 3]


def test_a_row_column_can_change_its_width():
    columns = Columns([Column(name="row", dtype="int32", shape=(3,), default=7, pad=0)], 2)
    columns["row"][columns.take()] = [1, 2, 3]
    columns.resize("row", 5)
    assert columns["row"].tolist() == [[1, 2, 3, 7, 7], [7] * 5]
    columns.resize("row", 2)
    assert columns["row"].tolist() == [[1, 2], [7, 7]]


def test_unknown_and_doubled_names_say_so():
    columns = two()
    with pytest.raises(ColumnError, match="there is no column 'shape'; declared are: share, mask"):
        columns["shape"]
    with pytest.raises(ColumnError, match="'share' is declared twice"):
        columns.declare(Column(name="share", dtype="int32", default=0, pad=0))
