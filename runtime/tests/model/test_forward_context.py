"""The forward context."""

from __future__ import annotations

import threading

import pytest
from hardpoint.errors import CancelledStepError, LifecycleError
from hardpoint_runtime.forward_context import (
    ForwardContext,
    current,
    entered,
    is_entered,
    overridden,
)
from hardpoint_runtime.graphs.keys import BatchKey


def test_contexts_nest_and_come_back():
    outer, inner = ForwardContext(step_id=1), ForwardContext(step_id=2)
    assert not is_entered()
    with entered(outer):
        assert current() is outer
        with entered(inner):
            assert current() is inner
        assert current() is outer
    assert not is_entered()


def test_an_exception_inside_brings_the_previous_back():
    outer = ForwardContext(step_id=1)
    with entered(outer):
        with pytest.raises(RuntimeError, match="inside"), entered(ForwardContext(step_id=2)):
            raise RuntimeError("inside")
        assert current() is outer


def test_outside_is_a_named_error():
    with pytest.raises(LifecycleError, match="no forward context"):
        current()


def test_threads_do_not_see_each_other():
    both_in = threading.Barrier(2, timeout=20)
    seen = {}

    def run(step_id):
        with entered(ForwardContext(step_id=step_id)):
            both_in.wait()
            seen[step_id] = current().step_id
            both_in.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1: 1, 2: 2}
    assert not is_entered()


def test_a_layer_sees_what_the_platform_put_in():
    with entered(ForwardContext(extra={"acme": 7}, graph_mode="FULL")):
        assert current().extra["acme"] == 7
        assert current().graph_mode == "FULL"


def test_a_layer_reads_adapters_spans_and_the_connectors_role():
    context = ForwardContext(
        active_loras={"pirate": 2},
        multimodal_spans={"r": [(3, 7)]},
        connector_role="producer",
        batch_key=BatchKey(num_tokens=4),
        num_tokens=3,
    )

    def layer():
        step = current()
        return step.active_loras["pirate"], step.multimodal_spans["r"], step.connector_role

    with entered(context):
        assert layer() == (2, [(3, 7)], "producer")
        assert (current().batch_key.num_tokens, current().num_tokens) == (4, 3)
    empty = ForwardContext()
    assert not empty.active_loras
    assert not empty.multimodal_spans
    assert empty.connector_role is empty.batch_key is empty.num_tokens is None


def test_an_override_changes_what_it_names_and_ends():
    with entered(ForwardContext(step_id=4, graph_mode="FULL")) as outer:
        with overridden(graph_mode="NONE", skip_compiled=True) as inner:
            assert current() is inner
            assert (inner.step_id, inner.graph_mode, inner.skip_compiled) == (4, "NONE", True)
        assert current() is outer
        assert (outer.graph_mode, outer.skip_compiled) == ("FULL", False)
    with pytest.raises(LifecycleError, match="no forward context"), overridden(step_id=1):
        pass


def test_a_cancelled_step_says_which():
    ForwardContext().raise_if_cancelled()
    with pytest.raises(CancelledStepError, match="step 12"):
        ForwardContext(step_id=12, cancelled=lambda: True).raise_if_cancelled()
