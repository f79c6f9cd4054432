"""Statistics of graphs as metrics, in the trace, and as a table at the end."""

from __future__ import annotations

import json
import logging

import pytest
from hardpoint.messages import (
    CachedRequestData,
    GraphStats,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTimings,
)
from hardpoint_engine.graph_table import GraphTable, print_table
from hardpoint_engine.step_trace import step_line


def table(*rows) -> GraphTable:
    made = GraphTable()
    for steps, mode, unpadded, padded in rows:
        for _ in range(steps):
            made.add(GraphStats(unpadded=unpadded, padded=padded, mode=mode))
    return made


def test_the_table_adds_up():
    made = table((3, "FULL", 3, 4), (1, "NONE", 700, 700), (10, "FULL", 1, 1))
    made.add(None)
    assert made.modes == {"FULL": 13, "NONE": 1}
    assert made.pads == 3
    assert made.text() == (
        "mode  tokens  padded  pads  steps\n"
        "FULL       1       1     0     10\n"
        "FULL       3       4     1      3\n"
        "NONE     700     700     0      1\n"
        "13 of 14 steps replayed a graph; 3 of 722 tokens were padding\n"
    )
    assert json.loads(json.dumps(made.as_dict()))["steps"][1] == {
        "mode": "FULL", "unpadded": 3, "padded": 4, "steps": 3,
    }  # fmt: skip
    assert GraphTable().text() == "graphs: no step reported any\n"


def test_steps_are_counted_as_metrics_and_two_engines_count_apart(engine):
    first, second = engine(), engine()
    first.ask((1, 2, 3), max_tokens=4)
    metrics = first.core.metrics
    assert metrics.graphs.modes == {"fake": metrics.steps}
    counted = sum(row["steps"] for row in metrics.as_dict()["graphs"]["steps"])
    assert counted == metrics.steps == 4
    assert not second.core.metrics.graphs.counts


def test_a_failed_step_is_none_of_the_table(engine):
    started = engine(dummy={"fail_at": "step:2"})
    started.ask((1, 2, 3), max_tokens=4)
    metrics = started.core.metrics
    assert (metrics.failed_steps, metrics.graphs.counts.total()) == (1, metrics.steps - 1)


@pytest.mark.parametrize("asked", [True, False])
def test_the_table_is_printed_once_at_the_end_on_request(engine, capsys, asked):
    started = engine(graph_stats=asked)
    started.ask((1, 2, 3), max_tokens=4)
    assert capsys.readouterr().err == ""
    started.core.shutdown()
    started.core.shutdown()
    told = capsys.readouterr().err
    assert told.count("4 of 4 steps replayed a graph") == asked


def test_a_closed_or_missing_standard_error_hurts_nobody(monkeypatch, tmp_path):
    closed = (tmp_path / "closed").open("w")
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr("sys.stderr", stream)
        print_table(table((1, "FULL", 1, 1)))


def test_the_trace_has_a_line_for_each_step_at_level_debug(engine, caplog):
    started = engine()
    with caplog.at_level(logging.INFO):
        started.ask((1, 2, 3), max_tokens=2)
    assert not [record for record in caplog.records if record.name == "hardpoint.steps"]
    with caplog.at_level(logging.DEBUG, "hardpoint.steps"):
        started.ask((1, 2, 3), max_tokens=2)
    lines = [record.getMessage() for record in caplog.records if record.name == "hardpoint.steps"]
    assert len(lines) == 2
    assert lines[0].startswith("step 3: 3 tokens of 1 requests in ")
    assert "fake, 3 tokens padded to " in lines[0]


def test_a_line_of_the_trace():
    plan = SchedulerOutput(
        step_id=7,
        new=(),
        running=CachedRequestData(
            req_ids=("a",), new_blocks=(None,), num_computed=(3,), num_output=(1,)
        ),
        num_tokens={"a": 1},
        total_tokens=1,
    )
    output = ModelRunnerOutput(
        step_id=7,
        req_ids=("a",),
        tokens=((1,),),
        timings=StepTimings(prepare=0.001, forward=0.02, sample=0.0005),
        graph_stats=GraphStats(unpadded=1, padded=4, mode="FULL"),
    )
    assert step_line(plan, output, 0.0225) == (
        "step 7: 1 tokens of 1 requests in 22.500 ms; FULL, 1 tokens padded to 4; prepare 1.000, "
        "forward 20.000, sample 0.500 ms"
    )
    assert step_line(plan, None, 0.5) == "step 7: 1 tokens of 1 requests in 500.000 ms; failed"
