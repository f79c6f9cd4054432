"""Plans that contradict themselves are refused on receipt; messages are frozen values."""

from __future__ import annotations

import pickle

import pytest
from attrs import evolve
from attrs.exceptions import FrozenInstanceError
from hardpoint.messages import (
    CachedRequestData,
    Logprobs,
    MessageError,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from hardpoint.sampling_params import SamplingParams

NEW = NewRequestData(req_id="n", prompt=(1, 2), sampling=SamplingParams(seed=1), block_ids=((1,),))
RUNNING = CachedRequestData(req_ids=("r",), new_blocks=(None,), num_computed=(4,))


def test_a_plan_that_agrees_with_itself_passes():
    SchedulerOutput(step_id=0).check()
    SchedulerOutput(step_id=1, finished=frozenset("x")).check()
    SchedulerOutput(
        step_id=2, new=(NEW,), running=RUNNING, num_tokens={"n": 2, "r": 3}, total_tokens=5,
        drafts={"r": (7, 8)},
    ).check()  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": {"x": 1}, "total_tokens": 1}, "names other requests"),
        ({"new": (NEW,)}, "names other requests"),
        ({"new": (NEW, NEW), "num_tokens": {"n": 2}, "total_tokens": 2}, "names other requests"),
        ({"new": (NEW,), "num_tokens": {"n": 2}, "total_tokens": 3}, "is not their sum"),
        ({"new": (NEW,), "num_tokens": {"n": 0}, "total_tokens": 0}, "is not their sum"),
        (
            {
                "running": CachedRequestData(req_ids=("r",), num_computed=(1,)),
                "num_tokens": {"r": 1},
                "total_tokens": 1,
            },
            "differ in length",
        ),
        (
            {
                "running": evolve(RUNNING, new_tokens=((7,), (8,))),
                "num_tokens": {"r": 1},
                "total_tokens": 1,
            },
            "new_tokens has 2 rows for 1 running",
        ),
        (
            {
                "running": RUNNING,
                "num_tokens": {"r": 1},
                "total_tokens": 1,
                "drafts": {"r": (1,)},
            },
            "more drafts than tokens",
        ),
        ({"drafts": {"ghost": (1,)}}, "more drafts than tokens"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(MessageError, match=message) as caught:
        SchedulerOutput(step_id=9, **fields).check()
    assert "step 9" in str(caught.value)


@pytest.mark.parametrize(
    ("known", "follow"), [(2, (7, 8, 9)), (3, (8, 9)), (4, (9,)), (5, ()), (6, ())]
)
def test_a_worker_takes_the_tokens_that_it_lacks(known, follow):
    """Of five output ids the plan tells the last three."""
    running = evolve(RUNNING, num_output=(5,), new_tokens=((7, 8, 9),))
    assert running.told(0, known) == follow
    assert evolve(running, new_tokens=()).told(0, known) == ()
    assert evolve(running, num_output=()).told(0, known) == (7, 8, 9)


def test_a_request_that_agrees_with_itself_passes():
    NEW.check()
    evolve(NEW, sampling=SamplingParams(temperature=0)).check()
    evolve(NEW, prefill_tokens=(1, 2, 3), num_computed=2).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"sampling": SamplingParams()}, "no seed"),
        ({"prefill_tokens": (2, 1, 3)}, "do not begin with the prompt"),
        ({"num_computed": 2}, "2 is not below its 2 tokens"),
        ({"num_computed": -1}, "-1 is not below"),
        ({"prefill_tokens": (1, 2, 3), "num_computed": 3}, "3 is not below its 3 tokens"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(MessageError, match=message):
        evolve(NEW, **fields).check()


def test_messages_are_frozen_and_travel_whole():
    plan = SchedulerOutput(step_id=1, new=(NEW,), extra={"mine": (1, 2)})
    with pytest.raises(FrozenInstanceError):
        plan.step_id = 2
    output = ModelRunnerOutput(step_id=1, req_ids=("n",), tokens=((3,),))
    for message in (plan, output):
        assert pickle.loads(pickle.dumps(message, protocol=5)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_best": 2},
        {"num_best": -1},
        {"values": ((-1.0,),)},
        {"ranks": ((1, 1), (2, 1))},
        {"ranks": ((1,),)},
        {"ids": ((5, 6), (7,)), "values": ((-1.0, -2.0), (-1.0,)), "ranks": ((1, 1),) * 2},
    ],
)
def test_rows_of_log_probabilities_must_hold_what_they_say(wrong):
    good = {"ids": ((5, 6),), "values": ((-1.0, -2.0),), "ranks": ((1, 1),), "num_best": 1}
    assert Logprobs(**good).num_best == 1
    assert Logprobs(ids=(), values=(), ranks=(), num_best=3).ids == ()
    with pytest.raises(MessageError, match=r"^log-probabilities: "):
        Logprobs(**good | wrong)
    with pytest.raises(TypeError):
        Logprobs(**{name: value for name, value in good.items() if name != "num_best"})
