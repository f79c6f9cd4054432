"""Scratch memory: aligned, disjoint, growing until it is locked."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.memory.workspace import ALIGNMENT, TAG, Workspace, WorkspaceLockedError
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


class CountingOps(HostDeviceOps):
    """Notes what is allocated, under which tag."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[int, str]] = []

    def allocate(self, num_bytes, tag):
        self.allocated.append((num_bytes, tag))
        return super().allocate(num_bytes, tag)


@pytest.fixture
def device() -> CountingOps:
    return CountingOps()


@pytest.fixture
def workspace(device) -> Workspace:
    return Workspace(device)


ASKS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(ASKS, min_size=1, max_size=4))
def test_views_are_aligned_disjoint_and_as_asked(calls):
    workspace = Workspace(HostDeviceOps())
    for asks in calls:
        views = workspace.views(*asks)
        assert [(list(each.shape), each.dtype) for each in views] == [
            (list(shape), dtype) for shape, dtype in asks
        ]
        spans = []
        for number, view in enumerate(views):
            offset = view.storage_offset() * view.element_size()
            assert offset % ALIGNMENT == 0
            spans.append((offset, offset + view.numel() * view.element_size()))
            view.fill_(number + 1)
        for number, view in enumerate(views):
            assert bool((view == number + 1).all())
        spans = sorted(span for span in spans if span[0] < span[1])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_the_buffer_grows_and_is_shared_by_what_fits(workspace, device):
    (first,) = workspace.views(((100,), torch.float32))
    (again,) = workspace.views(((7,), torch.int64))
    assert first.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    assert device.allocated == [(400, TAG)]
    (larger,) = workspace.views(((1000,), torch.float32))
    assert larger.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert device.allocated == [(400, TAG), (4000, TAG)]
    assert workspace.num_bytes == 4000  # nothing of the smaller buffer is kept


def test_lanes_are_apart(workspace):
    (here,) = workspace.views(((16,), torch.uint8), lane=(0, "compute"))
    (there,) = workspace.views(((16,), torch.uint8), lane=(1, "compute"))
    here.fill_(1)
    there.fill_(2)
    assert bool((here == 1).all())


def an_operation(workspace, rows, **more):
    return workspace.views(((rows, 8), torch.float32), **more)


def test_growth_after_the_lock_names_who_asked_and_the_sizes(workspace, device):
    an_operation(workspace, 4)
    workspace.lock()
    an_operation(workspace, 4)
    an_operation(workspace, 3)
    with pytest.raises(WorkspaceLockedError) as caught:
        an_operation(workspace, 5)
    told = str(caught.value)
    assert "lane 0 would grow from 128 to 160 bytes for (5, 8) of torch.float32" in told
    assert "asked by an_operation (" in told
    assert "test_workspace.py:" in told
    with pytest.raises(WorkspaceLockedError, match="lane 'second' would grow from 0 to 128 bytes"):
        an_operation(workspace, 4, lane="second")
    assert len(device.allocated) == 1
    an_operation(workspace, 4)  # and it still serves what fits


def test_what_is_kept_is_the_same_tensor_each_time(workspace, device):
    counters = workspace.keep("counters", (4,), torch.int64)
    assert counters.tolist() == [0, 0, 0, 0]
    counters[2] = 5
    workspace.views(((10_000,), torch.uint8))
    workspace.lock()
    again = workspace.keep("counters", (4,), torch.int64)
    assert again.data_ptr() == counters.data_ptr()
    assert again.tolist() == [0, 0, 5, 0]
    assert device.allocated == [(32, TAG), (10_000, TAG)]
    assert workspace.num_bytes == 10_032
    with pytest.raises(ValueError, match=r"'counters' is \(4,\) of torch.int64, not \(5,\)"):
        workspace.keep("counters", (5,), torch.int64)
    with pytest.raises(WorkspaceLockedError, match="'more' of 8 bytes would be added"):
        workspace.keep("more", (1,), torch.int64)


def test_the_end_gives_all_back(workspace):
    workspace.keep("a", (4,), torch.int64)
    workspace.views(((8,), torch.uint8))
    workspace.lock()
    workspace.clear()
    assert workspace.num_bytes == 0
    workspace.views(((8,), torch.uint8))
