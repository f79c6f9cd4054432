"""What the device must find out, and what it must let pass. Collected by ``test_ordered_runner.py``
only: it needs the device.
"""

from __future__ import annotations

import gc

import pytest
import torch
from ordered_device import DEVICE, Event, OrderError, PinnedTensor, Stream

ORDERED = torch.device("ordered", 0)


def on_device(values):
    return torch.tensor(values, device=ORDERED)


def pinned(*shape, dtype=torch.float32):
    return PinnedTensor.new(shape, dtype)


# What is right.


def test_work_on_one_stream_is_in_order():
    values = on_device([1.0, 2.0])
    values.add_(1).mul_(2)
    assert (values @ values).item() == 52.0
    assert values.tolist() == [4.0, 6.0]
    assert values.cpu().tolist() == [4.0, 6.0]


def test_a_guarded_copy_to_the_host():
    host, values, event = pinned(2), on_device([1.0, 2.0]) + 1, Event()
    host.copy_(values, non_blocking=True)
    event.record()
    event.synchronize()
    assert host.tolist() == [2.0, 3.0]


def test_a_copy_on_a_stream_that_waits_for_compute():
    host, values, event, copies = pinned(2), on_device([1.0, 2.0]) * 3, Event(), Stream()
    copies.wait_stream(DEVICE.current)
    with copies:
        host.copy_(values, non_blocking=True)
        event.record()
    assert (values + 1).numel() == 2  # goes on meanwhile, in other memory
    event.synchronize()
    assert host.numpy().tolist() == [3.0, 6.0]


def test_events_carry_what_their_stream_has_seen():
    first, second, third = Stream(), Stream(), Stream()
    with first:
        values = on_device([1.0]) + 1
    second.wait_event(first.record_event())
    third.wait_event(second.record_event())
    with third:
        values.add_(1)
    third.synchronize()
    with second:
        assert values.item() == 3.0


def test_page_locked_memory_may_be_used_again_after_its_event():
    host, event = pinned(2), Event()
    host.fill_(1)
    first = host.to(ORDERED, non_blocking=True)
    event.record()
    event.synchronize()
    host.fill_(2)
    second = host.to(ORDERED, non_blocking=True)
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_question_to_an_event_is_answered_in_the_end():
    host, event = pinned(1), Event()
    host.copy_(on_device([5.0]), non_blocking=True)
    event.record()
    assert not event.query()
    with pytest.raises(OrderError):
        host.item()
    while not event.query():
        pass
    assert host.item() == 5.0


def test_views_of_page_locked_memory_are_no_reads():
    host, event = pinned(4), Event()
    host[:2].copy_(on_device([1.0, 2.0]), non_blocking=True)
    event.record()
    assert host[:2].shape == (2,)
    assert host.is_pinned is not None
    event.synchronize()
    assert host[:2].tolist() == [1.0, 2.0]


def test_the_log_has_the_order():
    host, event = pinned(1), Event()
    host.copy_(on_device([5.0]), non_blocking=True)
    event.record()
    event.synchronize()
    assert DEVICE.log[-3:] == [
        ("default stream", "copy to the host"),
        ("default stream", "record event"),
        ("host", "wait"),
    ]


# What is wrong.


READS = {
    "tolist": lambda host: host.tolist(),
    "item": lambda host: host[0].item(),
    "numpy": lambda host: host.numpy(),
    "an index": lambda host: float(host[0]),
    "arithmetic": lambda host: host + 1,
    "a copy on the host": lambda host: torch.empty(2).copy_(host),
    "a copy to the device": lambda host: host.to(ORDERED, non_blocking=True),
    "repr": repr,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_before_the_event_that_guards_it(read):
    host, event = pinned(2), Event()
    host.copy_(on_device([1.0, 2.0]), non_blocking=True)
    event.record()
    with pytest.raises(OrderError, match="did not wait for the event that guards it"):
        read(host)
    event.synchronize()
    read(host)


def test_an_event_that_was_recorded_too_early_guards_nothing():
    host, event = pinned(2), Event()
    event.record()
    host.copy_(on_device([1.0, 2.0]), non_blocking=True)
    event.synchronize()
    with pytest.raises(OrderError, match="guards it"):
        host.tolist()


def test_who_keeps_an_array_of_the_memory_finds_rubbish():
    host, event = pinned(2, dtype=torch.uint8), Event()
    array = host.numpy()
    host.copy_(torch.tensor([1, 2], dtype=torch.uint8, device=ORDERED), non_blocking=True)
    event.record()
    assert array.tolist() == [0x5A, 0x5A]
    event.synchronize()
    assert array.tolist() == [1, 2]


def test_a_copy_that_does_not_wait_for_compute():
    copies, values, host = Stream(), on_device([1.0]) + 1, pinned(1)
    with copies, pytest.raises(OrderError, match=r"a copy to the host on .* reads what aten::add"):
        host.copy_(values, non_blocking=True)
    with copies, pytest.raises(OrderError, match="reads what aten::add"):
        values * 2
    with copies, pytest.raises(OrderError, match="a read by the host"):
        values.tolist()


def test_compute_that_does_not_wait_for_a_copy():
    copies, host = Stream(), pinned(1)
    host.fill_(3)
    with copies:
        values = host.to(ORDERED, non_blocking=True)
    with pytest.raises(OrderError, match=r"reads what copy_ on stream"):
        values + 1
    DEVICE.current.wait_stream(copies)
    assert (values + 1).item() == 4.0


def test_compute_that_overwrites_what_a_copy_still_reads():
    copies, values, host = Stream(), on_device([1.0]) + 1, pinned(1)
    copies.wait_stream(DEVICE.current)
    with copies:
        host.copy_(values, non_blocking=True)
    with pytest.raises(OrderError, match="overwrites what stream 1 still reads"):
        values.add_(1)
    DEVICE.current.wait_stream(copies)
    values.add_(1)


def test_page_locked_memory_that_is_used_again_too_soon():
    host = pinned(1)
    host.fill_(1)
    host.to(ORDERED, non_blocking=True)
    for change in (lambda: host.fill_(2), lambda: host.__setitem__(0, 2.0), host.numpy):
        with pytest.raises(OrderError, match="may still read"):
            change()


def test_page_locked_memory_that_is_changed_behind_the_back():
    host = pinned(1)
    host.fill_(1)
    array = host.numpy()
    host.to(ORDERED, non_blocking=True)
    array[0] = 2
    with pytest.raises(OrderError, match="changed page-locked memory before the copy"):
        DEVICE.synchronize()


def test_memory_that_is_given_back_before_the_copy_is_done():
    copies, values, host = Stream(), on_device([1.0]) + 1, pinned(1)
    copies.wait_stream(DEVICE.current)
    with copies:
        host.copy_(values, non_blocking=True)
    del values
    gc.collect()
    with pytest.raises(OrderError, match="given back before the copy was done"):
        copies.synchronize()


def test_memory_that_is_given_back_to_a_stream_that_waited_for_the_copy():
    copies, values, host = Stream(), on_device([1.0]) + 1, pinned(1)
    copies.wait_stream(DEVICE.current)
    with copies:
        host.copy_(values, non_blocking=True)
    DEVICE.current.wait_stream(copies)
    del values
    gc.collect()
    copies.synchronize()
    assert host.item() == 2.0


def test_a_copy_that_nothing_can_guard():
    with pytest.raises(OrderError, match="not page-locked"):
        torch.empty(1).copy_(on_device([1.0]), non_blocking=True)


def test_host_tensors_among_device_tensors():
    with pytest.raises(RuntimeError, match="expected all tensors to be on ordered:0"):
        on_device([1.0]) + torch.ones(1)


# The port.


def test_the_port_copies_in_order(device):
    values = device.to_device([1, 2, 3], torch.int64)
    assert device.to_host(values * 2).tolist() == [2, 4, 6]
    fetch = device.fetch(values + 1)
    values.add_(10)
    target = torch.zeros(3, dtype=torch.int64, device=ORDERED)
    device.write(target, [7, 8, 9])
    assert device.to_host(target).tolist() == [7, 8, 9]
    assert fetch.wait().tolist() == [2, 3, 4]
    assert fetch.wait().tolist() == [2, 3, 4]


def test_what_is_on_its_way_waits_for_nothing_later(device):
    values = device.to_device([1], torch.int64) + 1
    fetch = device.fetch(values)
    later = on_device([1.0]) * 2
    fetch.wait()
    assert not DEVICE.knows(later.history.written)
    assert later.item() == 2.0


def test_what_is_on_its_way_is_held(device):
    fetch = device.fetch(device.to_device([1], torch.int64) + 1)
    gc.collect()
    assert fetch.wait().tolist() == [2]
