"""Ray's metrics behind the usual client library's methods (row R7); what is told of steps."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput, StepTicket
from hardpoint_ray import metrics


class Fake:
    """Stands for a metric of Ray: keeps what it was made with and told."""

    made: ClassVar[list[Fake]] = []

    def __init__(self, name, description="", tag_keys=(), boundaries=None):
        self.name, self.tag_keys, self.boundaries = name, tag_keys, boundaries
        self.told = []
        Fake.made.append(self)

    def inc(self, value, tags):
        self.told.append((value, tags))

    set = observe = inc


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setattr(Fake, "made", [])
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics.ray.util.metrics, kind, Fake)
    return Fake.made


def test_names_are_made_fit_and_replicas_told_apart(fakes):
    metrics.Gauge("kv:usage-1/2", labels=("model",)).labels("small").set(0.5)
    assert fakes[0].name == "kv_usage_1_2"
    assert fakes[0].tag_keys == ("model", "ReplicaId")
    assert fakes[0].told == [(0.5, {"model": "small", "ReplicaId": ""})]


def test_a_child_does_not_change_its_parent(fakes):
    counter = metrics.Counter("tokens", labels=("kind",))
    counter.labels(kind="a").inc()
    counter.labels(kind="b").inc(2)
    counter.labels("a").inc(0)
    assert [(value, tags["kind"]) for value, tags in fakes[0].told] == [(1.0, "a"), (2, "b")]


@pytest.mark.parametrize(("values", "named"), [((), {}), (("a", "b"), {}), ((), {"other": "a"})])
def test_another_number_of_labels_is_an_error(values, named):
    with pytest.raises(ValueError, match=r"labels \['kind'\] need one value each"):
        metrics.Counter("tokens", labels=("kind",)).labels(*values, **named)


def test_a_step_and_a_failure_are_counted(fakes):
    told = metrics.StepMetrics()
    planned = SchedulerOutput(step_id=1, num_tokens={"a": 3}, total_tokens=3)
    told.step(planned, ModelRunnerOutput(step_id=1, req_ids=("a",), tokens=((5, 6),)), 0.25)
    told.failed(ValueError())
    by_name = {each.name: each.told for each in fakes}
    assert [value for value, _ in by_name["hardpoint_steps"]] == [1.0]
    assert {tags["kind"]: value for value, tags in by_name["hardpoint_tokens"]} == {
        "computed": 3,
        "sampled": 2,
    }
    assert [value for value, _ in by_name["hardpoint_step_seconds"]] == [0.25]
    assert [value for value, _ in by_name["hardpoint_failures"]] == [1.0]


def test_tokens_of_a_deferred_step_are_counted_when_they_are_sampled(fakes):
    told = metrics.StepMetrics()
    planned = SchedulerOutput(step_id=1, num_tokens={"a": 3}, total_tokens=3)
    told.step(planned, StepTicket(step_id=1), 0.25)
    told.gave(ModelRunnerOutput(step_id=1, req_ids=("a",), tokens=((5, 6),)))
    (tokens,) = [each.told for each in fakes if each.name == "hardpoint_tokens"]
    assert [(tags["kind"], value) for value, tags in tokens] == [("computed", 3), ("sampled", 2)]
