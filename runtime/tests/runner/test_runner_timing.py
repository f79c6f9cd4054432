"""Timing of batches by size: off by default, and then nobody waits for the device."""

from __future__ import annotations

import logging

import pytest
from hardpoint.config.schema import ObservabilityConfig
from hardpoint_runtime.model_runner import TorchModelRunner


@pytest.fixture
def run(make_runner, make_driver):
    """Run four steps; return the runner and how often it waited for the device meanwhile."""

    def steps(interval):
        observability = ObservabilityConfig(batch_timing_interval=interval)
        runner = make_runner(TorchModelRunner, observability=observability)
        runner.warm_up()
        waits = []
        synchronize = runner.device.synchronize

        def counted():
            waits.append(1)
            synchronize()

        runner.device.synchronize = counted
        driver = make_driver(runner)
        driver.add("a", [3, 1, 2])
        driver.step({"a": 3})
        driver.step({"a": 1})
        driver.step({"a": 1})
        driver.step({})
        return runner, len(waits)

    return steps


def test_off_nothing_is_measured_and_nobody_waits(run):
    runner, waits = run(None)
    assert runner.timing is None
    assert waits == 0


def test_on_each_forward_is_measured_by_its_tokens(run):
    runner, waits = run(3600.0)
    assert {size: len(times) for size, times in runner.timing.seconds.items()} == {3: 1, 1: 2}
    assert waits == 2 * 3


def test_the_log_tells_medians_every_so_often(run, caplog):
    with caplog.at_level(logging.WARNING, logger="hardpoint.batches"):
        run(1e-9)
    assert len(caplog.messages) == 3
    assert "3 tokens: 1 x" in caplog.messages[0]
