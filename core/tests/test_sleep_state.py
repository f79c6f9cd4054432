"""The sleep state machine: a table of transitions, and a plain model of it under random use."""

from __future__ import annotations

import pytest
from hardpoint.sleep import LEVELS, TAGS, Residency, SleepState, SleepStateError, check_tags
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

A, S, U, P = (
    Residency.AWAKE,
    Residency.ASLEEP,
    Residency.WEIGHTS_UNDEFINED,
    Residency.PARTIAL,
)

DO = {
    "sleep 1": lambda state: state.slept(1),
    "sleep 2": lambda state: state.slept(2),
    "wake": lambda state: state.woke(TAGS),
    "wake weights": lambda state: state.woke(["weights"]),
    "wake kv": lambda state: state.woke(["kv_cache"]),
    "discard kv": lambda state: state.discarded(["kv_cache"]),
    "discard weights": lambda state: state.discarded(["weights"]),
    "reload": lambda state: (state.begin_reload(), state.reloaded()),
    "begin reload": lambda state: state.begin_reload(),
    "fail": lambda state: state.partial(TAGS),
    "fail level 2": lambda state: state.partial(TAGS, weights_dropped=True),
}

TABLE = [
    ([], A, A),
    (["sleep 1"], S, S),
    (["sleep 1", "wake"], A, A),
    (["sleep 1", "wake weights"], A, S),
    (["sleep 1", "wake kv"], S, A),
    (["sleep 1", "wake weights", "wake kv"], A, A),
    (["sleep 2"], S, S),
    (["sleep 2", "wake"], U, A),
    (["sleep 2", "wake weights"], U, S),
    (["sleep 2", "wake weights", "reload", "wake kv"], A, A),
    (["sleep 2", "wake", "sleep 1", "wake"], U, A),
    (["sleep 2", "wake", "reload", "sleep 1", "wake"], A, A),
    (["discard kv"], A, S),
    (["discard kv", "wake kv"], A, A),
    (["discard weights", "wake"], U, A),
    (["discard weights", "sleep 1", "wake"], U, A),
    (["discard weights", "wake", "reload"], A, A),
    (["begin reload"], U, A),
    (["begin reload", "sleep 1", "wake"], U, A),
    (["fail"], P, P),
    (["fail", "wake"], A, A),
    (["fail level 2", "wake"], U, A),
    (["fail level 2", "wake kv"], P, A),
]


@pytest.mark.parametrize(("actions", "weights", "kv_cache"), TABLE)
def test_transitions(actions, weights, kv_cache):
    state = SleepState()
    for action in actions:
        DO[action](state)
    assert state.state == {"weights": weights, "kv_cache": kv_cache}
    absent = {tag for tag, each in state.state.items() if each in (S, P)}
    assert state.sleeping_tags == absent
    assert state.is_sleeping == bool(absent)
    if (weights, kv_cache) == (A, A):
        state.require_awake("execute_model")
    else:
        with pytest.raises(SleepStateError, match="execute_model needs "):
            state.require_awake("execute_model")


@pytest.mark.parametrize("actions", [["sleep 1"], ["sleep 2"], ["fail"], ["discard weights"]])
def test_weights_that_are_not_there_cannot_be_reloaded(actions):
    state = SleepState()
    for action in actions:
        DO[action](state)
    before = state.state
    with pytest.raises(SleepStateError, match=r"wake_up\(tags=\['weights'\]\) first"):
        state.begin_reload()
    assert state.state == before


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, TAGS),
        ("weights", ("weights",)),
        (["kv_cache", "weights", "kv_cache"], ("kv_cache", "weights")),
        (iter(["weights"]), ("weights",)),
    ],
)
def test_tags_that_are_meant(given, meant):
    assert check_tags(given) == meant


@pytest.mark.parametrize("given", [[], "", "x", ["weights", "x"], [None]])
def test_tags_that_are_refused(given):
    with pytest.raises(ValueError, match="tags must be some of weights, kv_cache, not"):
        check_tags(given)


@pytest.mark.parametrize("level", [0, 3, None, "1", 1.5])
def test_levels_that_are_refused(level):
    with pytest.raises(ValueError, match="sleep level must be one of"):
        SleepState().has_slept(level)
    for fine in LEVELS:
        assert not SleepState().has_slept(fine)


def test_a_sleep_where_something_sleeps_is_the_same_sleep_or_an_error():
    state = SleepState()
    state.slept(1)
    assert state.has_slept(1)
    with pytest.raises(SleepStateError, match=r"weights asleep.*weights kept: wake_up\(\) first$"):
        state.has_slept(2)
    state.woke(["weights"])
    for level, way_out in ((1, "first$"), (2, r"or discard\(tags=\['weights'\]\)$")):
        with pytest.raises(SleepStateError, match=f"weights awake, kv_cache asleep.*{way_out}"):
            state.has_slept(level)
    state.discarded(["weights"])
    assert state.has_slept(2)
    state.partial(["weights"])
    with pytest.raises(SleepStateError, match="weights partial"):
        state.has_slept(2)


class RandomUse(RuleBasedStateMachine):
    """Whatever is done, executing is allowed exactly if memory is there and weights are whole."""

    def __init__(self):
        super().__init__()
        self.state = SleepState()
        self.resident = dict.fromkeys(TAGS, True)
        self.whole = True

    @rule(level=st.sampled_from(LEVELS))
    def sleep(self, level):
        self.state.slept(level)
        self.resident = dict.fromkeys(TAGS, False)
        self.whole = self.whole and level == 1

    @rule(tags=st.sets(st.sampled_from(TAGS), min_size=1))
    def wake(self, tags):
        self.state.woke(tags)
        self.resident.update(dict.fromkeys(tags, True))

    @rule(tags=st.sets(st.sampled_from(TAGS), min_size=1))
    def discard(self, tags):
        self.state.discarded(tags)
        self.resident.update(dict.fromkeys(tags, False))
        self.whole = self.whole and "weights" not in tags

    @rule(fails=st.booleans())
    def reload(self, fails):
        if not self.resident["weights"]:
            with pytest.raises(SleepStateError):
                self.state.begin_reload()
            return
        self.state.begin_reload()
        self.whole = not fails
        if not fails:
            self.state.reloaded()

    @invariant()
    def may_execute_exactly_if_all_is_there(self):
        fine = all(self.resident.values()) and self.whole
        try:
            self.state.require_awake("execute_model")
        except SleepStateError:
            assert not fine
        else:
            assert fine
        assert self.state.sleeping_tags == {t for t, there in self.resident.items() if not there}


RandomUse.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRandomUse = RandomUse.TestCase
