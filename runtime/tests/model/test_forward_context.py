"""The forward context."""

from __future__ import annotations

import threading

import pytest
from hardpoint.errors import CancelledStepError, LifecycleError
from hardpoint_runtime.forward_context import ForwardContext, current, entered, is_entered


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


def test_a_cancelled_step_says_which():
    ForwardContext().raise_if_cancelled()
    with pytest.raises(CancelledStepError, match="step 12"):
        ForwardContext(step_id=12, cancelled=lambda: True).raise_if_cancelled()
