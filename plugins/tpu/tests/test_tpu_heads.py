"""How heads and rows are spread over devices."""

from __future__ import annotations

import pytest
from hardpoint.errors import UnsupportedError
from hardpoint_tpu.heads import PADDING, head_layout, padded_rows


def valid(heads: int, kv_heads: int, devices: int) -> bool:
    return devices <= heads and (devices <= kv_heads or devices % kv_heads == 0)


CASES = [
    (heads, kv, devices)
    for kv in range(1, 6)
    for heads in range(kv, 13, kv)
    for devices in range(1, 13)
]


@pytest.mark.parametrize("devices", range(1, 13))
def test_each_query_head_is_once_on_a_device_with_its_key_head(devices):
    tried = 0
    for heads, kv_heads, count in CASES:
        if count != devices or not valid(heads, kv_heads, count):
            continue
        tried += 1
        layout = head_layout(heads, kv_heads, count)
        assert layout.devices == count
        seen = []
        for kv, queries in zip(layout.kv, layout.queries, strict=True):
            assert len(kv) == layout.kv_heads
            assert len(queries) == layout.query_heads == layout.kv_heads * layout.group
            for place, query in enumerate(queries):
                if query != PADDING:
                    seen.append(query)
                    assert kv[place // layout.group] == query // (heads // kv_heads)
        assert sorted(seen) == list(range(heads))
        assert {head for kv in layout.kv for head in kv} - {PADDING} == set(range(kv_heads))
    assert tried


def test_the_first_devices_get_one_more_head():
    layout = head_layout(9, 3, 2)
    assert layout.kv == ((0, 1), (2, PADDING))
    assert layout.queries == ((0, 1, 2, 3, 4, 5), (6, 7, 8, PADDING, PADDING, PADDING))
    assert head_layout(8, 4, 3).kv == ((0, 1), (2, PADDING), (3, PADDING))


def test_more_devices_than_key_heads_hold_copies_and_share_the_queries():
    layout = head_layout(9, 3, 6)
    assert layout.kv == ((0,), (0,), (1,), (1,), (2,), (2,))
    assert layout.queries == ((0, 1), (2, PADDING), (3, 4), (5, PADDING), (6, 7), (8, PADDING))


@pytest.mark.parametrize(("heads", "kv", "devices"), [(9, 3, 4), (9, 3, 10), (4, 1, 5)])
def test_what_cannot_be_spread_is_refused(heads, kv, devices):
    with pytest.raises(UnsupportedError, match=f"tensor_parallel_size = {devices}"):
        head_layout(heads, kv, devices)


def test_rows_are_cut_into_equal_parts():
    assert padded_rows(7, 3) == [[0, 1, 2], [3, 4, 5], [6, PADDING, PADDING]]
    assert padded_rows(4, 2) == [[0, 1], [2, 3]]
