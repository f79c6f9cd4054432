"""Graphs are made once, in the plan's order, and never after warm-up (flaw 32 of the field)."""

from __future__ import annotations

import pytest
from hardpoint.errors import LifecycleError
from hardpoint_runtime.graphs.captured import CapturedGraphs
from hardpoint_runtime.graphs.dispatcher import Dispatcher
from hardpoint_runtime.graphs.keys import BatchKey, KeyRules, lora_cases
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import Capture, GraphPlan
from hardpoint_runtime.graphs.sizes import CaptureSizes


@pytest.fixture
def plan() -> GraphPlan:
    return GraphPlan.make(
        GraphMode.FULL_AND_PIECEWISE,
        CaptureSizes((1, 2, 4, 8)),
        KeyRules(max_num_seqs=4, lora_cases=lora_cases(2)),
        max_num_batched_tokens=16,
    )


class Recorder:
    """Notes what it is asked for; every graph holds 100 bytes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Capture]] = []
        self.held = 7

    def run(self, capture: Capture) -> None:
        self.events.append(("run", capture))

    def record(self, capture: Capture) -> str:
        self.events.append(("record", capture))
        self.held += 100
        return f"graph of {capture.key.num_tokens}"


@pytest.mark.parametrize("warm_ups", [0, 1, 3])
def test_order_count_and_once_only(plan, warm_ups):
    recorder = Recorder()
    graphs = CapturedGraphs(plan)
    report = graphs.capture_all(
        recorder.run, recorder.record, warm_ups=warm_ups, memory=lambda: recorder.held
    )
    expected = []
    for capture in plan.captures():
        expected += [("run", capture)] * warm_ups + [("record", capture)]
    assert recorder.events == expected
    assert (report.graphs, report.num_bytes) == (len(plan.graphs), 100 * len(plan.graphs))
    assert report.seconds >= 0
    assert len(graphs) == report.graphs
    with pytest.raises(LifecycleError, match="after warm-up"):
        graphs.capture_all(recorder.run, recorder.record, warm_ups=0)
    assert recorder.events == expected


def test_a_dispatch_finds_its_graph(plan):
    recorder = Recorder()
    graphs = CapturedGraphs(plan)
    graphs.capture_all(recorder.run, recorder.record)
    dispatch = Dispatcher(plan).dispatch(3, 3, 1, 1)
    assert graphs.find(dispatch.mode, dispatch.key) == "graph of 4"
    eager = Dispatcher(plan).dispatch(9, 1, 9)
    assert graphs.find(eager.mode, eager.key) is None


def test_a_stray_capture_is_an_error(plan):
    recorder = Recorder()
    graphs = CapturedGraphs(plan)
    capture = plan.captures()[0]
    graphs.add(capture, recorder.record)
    with pytest.raises(LifecycleError, match="was captured before"):
        graphs.add(capture, recorder.record)
    stranger = Capture(mode=GraphMode.FULL, key=BatchKey(num_tokens=3))
    with pytest.raises(LifecycleError, match=r"plan has no graph for FULL BatchKey\(num_tokens=3"):
        graphs.add(stranger, recorder.record)
    graphs.close()
    with pytest.raises(LifecycleError, match=r"after warm-up.*runs eagerly"):
        graphs.add(plan.captures()[1], recorder.record)
    assert len(recorder.events) == 1


def test_a_capture_that_fails_leaves_no_graph_behind_and_the_table_open(plan):
    graphs = CapturedGraphs(plan)

    def fail(capture):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        graphs.capture_all(lambda capture: None, fail)
    assert len(graphs) == 0
    assert not graphs.closed


def test_the_end_drops_all_and_lets_none_in(plan):
    recorder = Recorder()
    graphs = CapturedGraphs(plan)
    graphs.add(plan.captures()[0], recorder.record)
    graphs.clear()
    assert len(graphs) == 0
    with pytest.raises(LifecycleError):
        graphs.add(plan.captures()[0], recorder.record)
