"""The timing of batches."""

from __future__ import annotations

import logging

import pytest
from hardpoint_runtime.batch_timing import BatchTiming
from hardpoint_runtime.device import HostDeviceOps


class Clock(HostDeviceOps):
    """A device whose work is done when one waits for it, and the clock that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.due = 0.0
        self.waits = 0

    def synchronize(self):
        self.now += self.due
        self.due = 0.0
        self.waits += 1

    def time(self):
        return self.now


def test_it_waits_for_the_device_and_tells_counts_and_medians(caplog):
    device = Clock()
    timing = BatchTiming(1.0, device, device.time)
    device.due = 0.45  # somebody else's work

    def run(num_tokens, seconds):
        with timing.measured(num_tokens):
            device.due += seconds

    with caplog.at_level(logging.WARNING):
        for seconds in (0.1, 0.1, 0.15):
            run(8, seconds)
        assert not caplog.records
        run(1, 0.3)
    (record,) = caplog.records
    assert record.getMessage() == (
        "batches of the last 1.1 s: 1 tokens: 1 x 300.000 ms, 8 tokens: 3 x 100.000 ms"
    )
    assert device.waits == 8
    run(8, 0.2)
    assert timing.text() == "8 tokens: 1 x 200.000 ms"  # begun anew


def test_what_raises_is_not_measured():
    device = Clock()
    timing = BatchTiming(1.0, device, device.time)
    with pytest.raises(RuntimeError), timing.measured(3):
        raise RuntimeError
    assert timing.seconds == {}
