"""What a step reports, and the counter of batches without a graph."""

from __future__ import annotations

import logging

import pytest
from hardpoint.messages import GraphStats
from hardpoint_runtime.graphs.dispatcher import Dispatcher
from hardpoint_runtime.graphs.keys import KeyRules
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.sizes import CaptureSizes
from hardpoint_runtime.graphs.statistics import GraphCounts


@pytest.fixture
def plan() -> GraphPlan:
    return GraphPlan.make(
        GraphMode.FULL_AND_PIECEWISE,
        CaptureSizes((4, 8)),
        KeyRules(max_num_seqs=8),
        max_num_batched_tokens=16,
    )


def step(counts, plan, tokens, reqs, query):
    return counts.step(Dispatcher(plan).dispatch(tokens, reqs, query), tokens)


def test_each_step_says_what_it_was_padded_to_and_how_it_ran(plan, caplog):
    counts = GraphCounts(plan)
    with caplog.at_level(logging.INFO, "hardpoint.graphs"):
        assert step(counts, plan, 3, 3, 1) == GraphStats(unpadded=3, padded=4, mode="FULL")
        assert step(counts, plan, 5, 1, 5) == GraphStats(unpadded=5, padded=8, mode="PIECEWISE")
        for _ in range(3):
            assert step(counts, plan, 9, 1, 9) == GraphStats(unpadded=9, padded=9, mode="NONE")
        step(counts, plan, 10, 1, 10)
    assert counts.steps == {GraphMode.FULL: 1, GraphMode.PIECEWISE: 1, GraphMode.NONE: 4}
    assert counts.unknown == {9: 3, 10: 1}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # once for each shape
    assert told[0] == (
        "a step of 9 tokens runs eagerly: the plan of graphs (mode full_and_piecewise, up to 8 "
        "tokens) has none for it"
    )


def test_without_graphs_there_is_nothing_to_report(caplog):
    plan = GraphPlan.eager()
    counts = GraphCounts(plan)
    with caplog.at_level(logging.DEBUG):
        assert step(counts, plan, 3, 3, 1) is None
    assert not counts.unknown
    assert not caplog.records
