"""The order of a worker's life, as a table."""

from __future__ import annotations

import pytest
from hardpoint.errors import LifecycleError
from hardpoint.rpc.lifecycle import CAPABILITIES, NEEDS, STEPS, Lifecycle, Stage
from hardpoint.worker import Worker

ORDER = ["init_device", "load_model", "initialize_from_config", "compile_or_warm_up_model"]


def after(*methods):
    life = Lifecycle()
    for method in methods:
        life.require(method)
        life.done(method)
    return life


def test_the_way_through():
    life = after(*ORDER)
    assert life.stage is Stage.READY
    life.require("execute_model")
    life.require("compile_or_warm_up_model")
    life.done("compile_or_warm_up_model")
    assert life.stage is Stage.READY


@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize("method", [*ORDER, *NEEDS, "recorded_calls"])
def test_each_method_at_each_stage(done, method):
    life = after(*ORDER[:done])
    stage = Stage(done)
    if method in ORDER:
        goal = ORDER.index(method) + 1
        need = goal - 1
        repeatable = method == "compile_or_warm_up_model"
        fine = stage >= need if repeatable else stage == need
    else:
        need = NEEDS.get(method, Stage.BUILT)
        fine = stage >= need
    if fine:
        life.require(method)
        return
    with pytest.raises(LifecycleError) as caught:
        life.require(method)
    if stage < need:
        missing = [STEPS[each] for each in Stage if stage < each <= need]
        assert str(caught.value) == f"{method}: call {' and '.join(missing)} first"
    else:
        assert "was called already" in str(caught.value)


def test_nothing_but_shutdown_is_possible_afterwards():
    life = after(*ORDER)
    life.stage = Stage.CLOSED
    for method in [*ORDER, *NEEDS, "anything"]:
        with pytest.raises(LifecycleError, match="was shut down"):
            life.require(method)
    life.require("shutdown")


def test_a_failed_step_can_be_tried_again():
    life = after("init_device")
    life.require("load_model")
    life.require("load_model")
    assert life.stage is Stage.DEVICE


def test_every_method_of_the_contract_is_in_the_tables():
    public = {name for name in vars(Worker) if not name.startswith("_")}
    methods = public - {"rank", "is_driver_worker", "model_runner_class", "shutdown", "profile"}
    methods -= {"end_collectives"}  # it is no call: the process's control thread makes it
    methods -= {"other_calls"}  # nor is this: the host sets it
    assert methods == (NEEDS.keys() | set(ORDER)) - {"apply_model"}
    assert CAPABILITIES.keys() <= public
