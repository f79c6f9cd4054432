"""The account of an accelerator's memory, and the devices that a worker refuses."""

from __future__ import annotations

import logging
import types

import pytest
from hardpoint.errors import ConfigError, LifecycleError, MemoryBudgetError
from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.graph_memory import measured, rest
from hardpoint_runtime.accelerator.memory import MemoryProfile, MemorySnapshot
from hardpoint_runtime.graphs.keys import KeyRules
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import Capture, GraphPlan
from hardpoint_runtime.graphs.sizes import CaptureSizes

MIB = 1 << 20


def snapshot(used, reserved, total=1000):
    return MemorySnapshot(
        free=(total - used) * MIB, total=total * MIB, reserved=reserved * MIB, allocated=0
    )


@pytest.fixture
def figured(make_accelerator, monkeypatch):
    """A worker whose device says what the test says."""
    worker = make_accelerator(ready=False)
    worker.budget, worker.baseline = 900 * MIB, snapshot(used=50, reserved=10)
    worker._weight_bytes = 100 * MIB
    port = type(worker.port)
    monkeypatch.setattr(port, "peak_memory", lambda self, run: (run(), 300 * MIB)[1])
    monkeypatch.setattr(port, "snapshot", lambda self: snapshot(used=370, reserved=300))
    monkeypatch.setattr(port, "rounding", 2 * MIB)
    monkeypatch.setattr(worker.model_runner, "profile_graphs", lambda: 40 * MIB)
    return worker


def test_the_cache_gets_what_everything_else_leaves(figured, caplog):
    with caplog.at_level(logging.INFO, "hardpoint.worker"):
        available = figured.determine_available_memory()
    libraries, rounding = 30, 2 * 2  # of 40 MiB before and 70 after; of two layers
    assert available == (900 - 300 - 40 - libraries - rounding) * MIB
    for number in (900, 100, 200, 40, 30, 4, available // MIB):
        assert str(number * MIB) in caplog.text


def test_what_others_give_back_meanwhile_is_not_ours(figured, monkeypatch):
    """Measuring never fails by what other processes do."""
    monkeypatch.setattr(
        type(figured.port), "snapshot", lambda self: snapshot(used=301, reserved=300)
    )
    figured.determine_available_memory()
    assert figured.memory_profile.other == 0


def test_a_model_that_is_too_large_leaves_less_than_nothing_and_is_told(figured, caplog):
    figured.budget = 250 * MIB
    with caplog.at_level(logging.WARNING, "hardpoint.worker"):
        assert figured.determine_available_memory() < 0
    assert f"of a budget of {250 * MIB} bytes, {100 * MIB} are weights" in caplog.text


def test_the_profile_really_runs_and_leaves_no_trace(make_accelerator, make_driver):
    worker = make_accelerator(ready=False, mode="full_and_piecewise")
    worker.determine_available_memory()
    profile, runner = worker.memory_profile, worker.model_runner
    assert profile.peak >= profile.weights > 0
    assert runner.graph_memory == profile.graphs
    assert (runner.kv_cache, runner.builders, runner.graphs) == (None, (), None)
    assert runner.profiled
    assert not runner.workspace.locked


def test_a_cache_that_does_not_fit_is_an_error_with_the_account(make_accelerator, plan_for):
    worker = make_accelerator(ready=False)
    worker.memory_profile = MemoryProfile(budget=5, weights=3, peak=4)
    with pytest.raises(MemoryBudgetError) as caught:
        worker.initialize_from_config(plan_for(worker.get_kv_cache_spec(), 1 << 40))
    told = str(caught.value)
    assert "a KV cache of 1099511627776 blocks needs " in told
    assert f"of the {worker.port.memory_info().total} bytes" in told
    assert "of a budget of 5 bytes, 3 are weights, 1 the work space" in told
    assert "Lower memory_utilization or num_kv_blocks" in told


# Devices.


class OneOfTwo(AcceleratorDeviceOps):
    forked = False

    def __init__(self, index):
        super().__init__("cpu", 0, pins=False)
        self.device = types.SimpleNamespace(type="unit", index=index)
        self.taken = []

    def _call(self, name, *args):
        answers = {"device_count": lambda: 2, "set_device": self.taken.append}
        return answers[name](*args)

    @property
    def forked_too_late(self):
        return self.forked


def test_a_device_that_is_not_seen_is_refused():
    device = OneOfTwo(1)
    device.set_device()
    assert device.taken == [1]
    with pytest.raises(ConfigError, match=r"device 2 of unit is asked for .* this process sees 2$"):
        OneOfTwo(2).set_device()


def test_a_process_that_was_forked_too_late_is_refused():
    device = OneOfTwo(0)
    device.forked = True
    with pytest.raises(LifecycleError, match="forked of one that had taken unit devices"):
        device.set_device()
    assert device.taken == []


@pytest.mark.parametrize(("bad", "expected"), [(True, True), (False, False), (None, False)])
def test_torch_is_asked_whether_it_was_forked_too_late(bad, expected):
    device = AcceleratorDeviceOps("cpu", 0, pins=False)
    asked = {} if bad is None else {"_is_in_bad_fork": lambda: bad}
    device._module = types.SimpleNamespace(**asked)
    assert device.forked_too_late is expected


# Graphs.


def plan(mode, sizes, rows=4):
    return GraphPlan.make(
        mode, CaptureSizes(sizes), KeyRules(max_num_seqs=rows), max_num_batched_tokens=64
    )


def test_two_graphs_of_each_mode_are_measured_the_largest():
    found = measured(plan(GraphMode.FULL_AND_PIECEWISE, (1, 2, 4, 8, 16)))
    assert [(each.mode.name, each.key.num_tokens) for each in found] == [
        ("PIECEWISE", 16), ("PIECEWISE", 8), ("FULL", 4), ("FULL", 2),
    ]  # fmt: skip


def test_the_others_are_counted_as_the_last_one_measured():
    graphs = plan(GraphMode.FULL_AND_PIECEWISE, (1, 2, 4, 8, 16))
    growth = dict(zip(measured(graphs), (100, 10, 50, 5), strict=True))
    unmeasured = {each.mode.name: 0 for each in graphs.captures()}
    for each in graphs.captures():
        unmeasured[each.mode.name] += each not in growth
    assert unmeasured == {"PIECEWISE": len(graphs.graphs) - 3 - 2, "FULL": 1}
    assert rest(graphs, growth) == 10 * unmeasured["PIECEWISE"] + 5 * unmeasured["FULL"]


def test_a_plan_that_is_measured_whole_has_no_rest():
    graphs = plan(GraphMode.FULL, (8,), rows=1)
    growth = {Capture(mode=each.mode, key=each.key): 7 for each in graphs.captures()}
    assert rest(graphs, growth) == 0
