"""What is kept of a request between steps is what it would be made anew, and costs what is new."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hardpoint.messages import CachedRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.sampling import batch as batch_module
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PENALISED = SamplingParams(temperature=0, frequency_penalty=1, max_tokens=None)
TOKENS = st.integers(0, 6)
HISTORY = st.lists(TOKENS, max_size=5)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), TOKENS),
        st.tuples(st.just("look"), st.none()),
        st.tuples(st.just("cut"), st.integers(0, 3)),
        st.tuples(st.just("told"), HISTORY),
        st.tuples(st.just("replaced"), HISTORY),
        st.tuples(st.just("again"), HISTORY),
    ),
    max_size=12,
)


def run(requests, **running):
    """Tell ``requests`` of a step in which the request runs."""
    rows = CachedRequestData(req_ids=("a",), new_blocks=(None,), num_computed=(0,), **running)
    requests.update(SchedulerOutput(step_id=1, running=rows, num_tokens={"a": 1}, total_tokens=1))


def look(requests):
    return build_sampling_batch(requests, ["a"], vocab_size=50_000)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TOKENS, min_size=1, max_size=4), HISTORY, OPERATIONS)
def test_counts_are_those_of_the_history(make_requests, prompt, output, operations):
    """Whatever happens to it: it grows, is cut, told, replaced, or the request comes again."""
    requests = make_requests({"a": (PENALISED, prompt, output)})
    for what, value in [*operations, ("look", None)]:
        if what == "token":
            requests.append_token("a", value)
            output = [*output, value]
        elif what == "cut" and len(output) > value:
            run(requests, num_output=(len(output) - value,))
            output = output[: len(output) - value]
        elif what == "told" and value:
            run(
                requests,
                new_tokens=(tuple(value),),
                num_output=(len(output) + len(value),),
            )
            output = [*output, *value]
        elif what == "replaced":
            run(requests, all_tokens={"a": (*prompt, *value)}, resumed=frozenset())
            output = value
        elif what == "again":
            requests.forget(["a"])
            make_requests.add(requests, "a", PENALISED, prompt, value)
            output = value
        else:
            penalties, counts = look(requests).penalties, Counter(output)
            found = list(zip(penalties.places.ids.tolist(), penalties.counts, strict=True))
            assert len(found) == len(dict(found))
            assert dict(found) == {each: counts[each] for each in {*prompt, *output}}


@pytest.fixture
def work(monkeypatch):
    """Count what steps do: lines of our own code, and items that arrays and sets are made of."""

    def of(steps):
        done = 0

        def counted(make):
            def spy(values, *more, **options):
                nonlocal done
                values = values if hasattr(values, "__len__") else list(values)
                done += len(values)
                return make(values, *more, **options)

            return spy

        def trace(frame, event, arg):
            nonlocal done
            if "hardpoint_runtime" not in frame.f_code.co_filename:
                return None
            done += event == "line"
            return trace

        before = sys.gettrace()
        with monkeypatch.context() as patch:
            for name in ("unique", "asarray", "array", "fromiter"):
                patch.setattr(np, name, counted(getattr(np, name)))
            patch.setattr(batch_module, "set", counted(set), raising=False)
            sys.settrace(trace)
            try:
                steps()
            finally:
                sys.settrace(before)
        return done

    return of


@pytest.mark.parametrize(
    "sampling",
    [
        PENALISED,
        SamplingParams(temperature=0, allowed_token_ids=range(20_000)),
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(20_000), 1.0)),
        SamplingParams(temperature=0, bad_word_ids=[(n, n + 1) for n in range(4000)]),
    ],
    ids=["penalised", "allowed", "biased", "bad words"],
)
def test_a_step_costs_what_is_new(make_requests, work, sampling):
    """Not what there is of the history, nor of the ids that were named."""

    def cost(length):
        requests = make_requests({"a": (sampling, range(length), [5])}, longest=length + 100)

        def steps():
            for token in range(10):
                look(requests)
                requests.append_token("a", token)

        look(requests)
        return work(steps)

    short, long = cost(10), cost(10_000)
    assert 0 < short < 3000
    assert long <= 1.1 * short


def test_what_is_named_is_made_once_for_all_steps(make_requests):
    wish = SamplingParams(temperature=0, allowed_token_ids=(4, 2, 4), logit_bias={3: 2.0, 1: -1.0})
    requests = make_requests({"a": wish})
    first, second = look(requests), look(requests)
    assert first.allowed.ids.tolist() == second.allowed.ids.tolist() == [2, 4]
    places, values = second.bias
    assert dict(zip(places.ids.tolist(), values.tolist(), strict=True)) == {3: 2.0, 1: -1.0}
    kept = requests["a"].kept
    assert kept.allowed(wish) is kept.allowed(wish)
