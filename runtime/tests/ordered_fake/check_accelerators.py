"""Graphs, figures of memory and sleep on the device that enforces order. Collected by
``test_ordered_runner.py`` only.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hardpoint_runtime.graphs.errors import GraphCaptureError
from ordered_device import DEVICE, Event, OrderError, PinnedTensor, Stream
from ordered_graph import OWN_BYTES, CaptureError
from ordered_memory import MEMORY

ORDERED = torch.device("ordered", 0)


def on_device(values):
    return torch.tensor(values, device=ORDERED)


# The device itself.


def test_a_capture_leaves_no_trace_and_a_replay_does_the_work(device):
    x, total = on_device([1.0, 2.0]), on_device([0.0])
    graph = device.capture(lambda: total.add_((x * 2).sum()), "key")
    assert total.item() == 0
    x.fill_(5)
    device.replay(graph)
    assert total.item() == 20.0
    device.replay(graph)
    assert total.item() == 40.0


def test_results_of_a_pool_are_those_of_the_last_replay(device):
    x, pool = on_device([1.0]), device.graph_pool()
    first = device.capture(lambda: x + 1, "first", pool=pool)
    second = device.capture(lambda: x + 2, "second", pool=pool)
    assert device.replay(first).item() == 2.0
    assert device.replay(second).item() == 3.0
    assert first.output.item() != 2.0
    assert device.replay(first).item() == 2.0


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: DEVICE.synchronize(),
        lambda x: x.add_(torch.ones(2).to(ORDERED)),
    ],
    ids=["item", "copy to the host", "synchronize", "copy from the host"],
)
def test_what_cannot_be_captured_is_a_named_error_and_the_next_capture_works(device, work):
    x = on_device([1.0, 2.0])
    with pytest.raises(GraphCaptureError, match=r"not capture key: .* not permitted"):
        device.capture(lambda: work(x), "key")
    assert device.replay(device.capture(lambda: x + 1, "key")).tolist() == [2.0, 3.0]


def test_work_on_another_stream_is_not_captured(device):
    x, other = on_device([1.0]), Stream()

    def elsewhere():
        with other:
            x.add_(1)

    with pytest.raises(GraphCaptureError):
        device.capture(elsewhere, "key")


def elsewhere(work):
    """Return what ``work`` raises on a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).exception(60)


def test_what_another_thread_asks_does_not_end_a_capture(device):
    x, raised = on_device([1.0]), []

    def watched():
        raised.append(elsewhere(DEVICE.synchronize))
        return x + 1

    graph = device.capture(watched, "key")
    assert raised == [None]
    assert device.replay(graph).tolist() == [2.0]


def test_it_would_if_nobody_said_that_the_capture_is_of_one_thread(device):
    with Stream():
        graph = device.make_graph()
        graph.capture_begin()
        assert isinstance(elsewhere(DEVICE.synchronize), CaptureError)
        with pytest.raises(CaptureError, match="made invalid before"):
            graph.capture_end()


def test_other_errors_of_a_function_are_its_own(device):
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: 1 / 0, "key")
    assert DEVICE.capture is None


def test_no_cycle_is_collected_during_a_capture(device):
    seen = []
    device.capture(lambda: seen.append(gc.isenabled()), "key")
    assert (seen, gc.isenabled()) == ([False], True)


def test_the_capture_waits_for_work_before_and_later_work_for_the_capture(device):
    x = on_device([1.0]).add_(1)
    graph = device.capture(lambda: x.add_(1), "key")
    device.replay(graph)
    assert x.item() == 3.0


def test_the_default_stream_cannot_be_captured(device):
    with pytest.raises(CaptureError):
        device.make_graph().capture_begin()


def test_a_graph_gives_its_memory_back(device):
    x, before = on_device([1.0]), (MEMORY.other, MEMORY.memory_allocated())
    graph = device.capture(lambda: x * 2 + 1, "key")
    assert MEMORY.other == before[0] + OWN_BYTES
    assert MEMORY.memory_allocated() > before[1]
    del graph
    assert (MEMORY.other, MEMORY.memory_allocated()) == before


# Memory.


def test_what_sleeps_cannot_be_touched(device):
    with device.pool("weights"):
        x = torch.zeros(4, device=ORDERED).add_(1)
    device.pools.sleep(("weights",), keep=("weights",))
    with pytest.raises(OrderError, match="touches memory that sleeps"):
        x + 1
    device.pools.wake(("weights",))
    assert (x + 1).tolist() == [2.0] * 4


def test_nothing_is_taken_from_under_work_that_goes_on(device):
    with device.pool("weights"):
        x = torch.zeros(4, device=ORDERED).add_(1)
    memory, piece = device.pools.memory, device.pools._of(["weights"])[0]
    x.add_(1)
    with pytest.raises(OrderError, match="memory is taken from under it while work"):
        memory.unmap(piece.address, piece.num_bytes)
    device.pools.sleep(("weights",), keep=("weights",))
    device.pools.wake(("weights",))
    assert x.tolist() == [2.0] * 4


def test_memory_goes_back_when_the_work_of_tensors_that_are_gone_is_done(device, caplog):
    device.empty_cache()
    before = MEMORY.mapped
    with device.pool("weights"):
        x = torch.zeros(4, device=ORDERED).add_(1)
    assert MEMORY.mapped > before
    x.add_(1)
    del x
    device.empty_cache()
    assert (MEMORY.mapped, caplog.records) == (before, [])


def test_pools_outlive_the_port_as_long_as_a_tensor_does(device):
    port = type(device)()
    with port.pool("weights"):
        x = torch.zeros(4, device=ORDERED).add_(1)
    del port
    gc.collect()
    assert x.tolist() == [1.0] * 4
    mapped = MEMORY.mapped
    del x
    gc.collect()
    assert MEMORY.mapped < mapped


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (OSError(1, "invalid value"), OSError, "invalid value"),
        (torch.OutOfMemoryError("none left"), torch.OutOfMemoryError, "none left"),
    ],
)
def test_why_a_pool_gives_no_memory_is_told(device, monkeypatch, error, raised, words):
    def fail(address, num_bytes):
        raise error

    monkeypatch.setattr(device.pools.memory, "map", fail)
    with pytest.raises(raised, match=words), device.pool("weights"):
        torch.zeros(4, device=ORDERED)
    monkeypatch.undo()
    with device.pool("weights"):
        assert torch.zeros(4, device=ORDERED).tolist() == [0.0] * 4


def test_what_the_allocator_keeps_unused_is_given_back_for_a_pool_that_has_no_memory_else(device):
    device.empty_cache()
    size = MEMORY.free // 2
    half = torch.empty(size, dtype=torch.uint8, device=ORDERED)
    del half
    assert MEMORY.free < size + (1 << 20)
    memory = device.pools.memory
    tensor = device.allocate(1 << 20, "weights")
    other = device.pools.allocate("kv_cache", 0)
    device.pools.sleep(("kv_cache",))
    MEMORY.other = MEMORY.free
    try:
        assert MEMORY.kept > 0
        device.pools.wake(("kv_cache",))
    finally:
        MEMORY.other = 0
    assert (MEMORY.kept, tensor.sum().item()) == (MEMORY.plain, 0)
    device.pools.free(other)
    assert memory.new_is_zero is False


def test_figures_of_what_sleeps(device):
    before = device.memory_allocated(), device.memory_info().free
    with device.pool("weights"):
        x = torch.zeros(1 << 20, device=ORDERED).add_(1)
    assert device.memory_allocated() == before[0] + x.nbytes
    device.pools.sleep(("weights",))
    assert (device.memory_allocated(), device.memory_info().free) == before
    device.pools.wake(("weights",))
    assert device.memory_info().free <= before[1] - x.nbytes


def test_the_peak_is_of_what_is_run_and_holds_what_the_allocator_keeps(device):
    held = device.memory_allocated()
    big = torch.zeros(1 << 20, device=ORDERED)
    del big
    num_bytes = 1 << 18

    def run():
        for _ in range(2):
            torch.zeros(num_bytes, dtype=torch.uint8, device=ORDERED)

    assert held + num_bytes <= device.peak_memory(run) < held + 2 * num_bytes


def test_copies_are_still_guarded_around_replays(device):
    x = on_device([1.0, 2.0])
    graph = device.capture(lambda: x * 2, "key")
    host, event = PinnedTensor.new((2,), torch.float32), Event()
    host.copy_(device.replay(graph), non_blocking=True)
    event.record()
    with pytest.raises(OrderError):
        host.tolist()
    event.synchronize()
    assert host.tolist() == [2.0, 4.0]
