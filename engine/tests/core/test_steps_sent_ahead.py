"""A step that is sent as soon as the last is taken in, before anything else is done with that."""

from __future__ import annotations

import pytest
from hardpoint.sleep import SleepStateError


@pytest.fixture
def one(engine):
    """An engine with one request."""
    made = engine()
    made.add("a", (1, 2, 3), max_tokens=6)
    return made


def sent(one):
    return len(one.calls("execute_model"))


def test_it_is_sent_if_it_is_wanted_and_the_tokens_are_the_same(engine, one):
    seen = []

    def goes_on(outputs):
        seen.extend(outputs)
        assert one.core.metrics.steps == len(seen) - 1
        return outputs[0].finish_reason is None

    given = []
    for number in range(1, 7):
        given += one.core.step(goes_on)
        assert one.core.metrics.steps == number
        assert sent(one) == min(number + 1, 6)
    assert given == seen
    assert [token for output in given for token in output.new_tokens] == list(
        engine().ask((1, 2, 3), max_tokens=6)
    )
    assert not one.core.has_unfinished()


@pytest.mark.parametrize("goes_on", [None, lambda _: False], ids=["never asked", "refused"])
def test_else_none_is_sent_that_nobody_asked_for(one, goes_on):
    one.core.step(goes_on)
    assert sent(one) == 1


def test_hooks_hear_of_the_end_of_a_step_before_the_beginning_of_the_next(one, monkeypatch):
    heard = []

    def announce(hook, *, scheduler_output, rank, **_):
        if rank is None:  # not that of a worker
            heard.append((hook, scheduler_output.step_id))

    monkeypatch.setattr(one.core.registry, "announce", announce)
    for _ in range(2):
        one.core.step(lambda _: True)
    started, finished = "hardpoint_step_started", "hardpoint_step_finished"
    assert heard == [(started, 1), (finished, 1), (started, 2), (finished, 2), (started, 3)]


def test_what_keeps_it_from_being_sent_is_raised_by_the_next(one, monkeypatch):
    def schedule():
        raise ZeroDivisionError

    def goes_on(_):
        monkeypatch.setattr(one.core.scheduler, "schedule", schedule)
        return True

    assert len(one.core.step(goes_on)) == 1
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        one.core.step()
    assert len(one.run().tokens["a"]) == 5


def test_what_is_asked_whether_it_is_wanted_may_raise(one):
    assert len(one.core.step(lambda _: 1 / 0)) == 1
    with pytest.raises(ZeroDivisionError):
        one.core.step()


def test_nothing_is_sent_to_workers_that_sleep(one):
    def goes_on(_):
        one.core.executor.sleep()
        return True

    assert len(one.core.step(goes_on)) == 1
    with pytest.raises(SleepStateError):
        one.core.step(lambda _: True)
    assert sent(one) == 1
    one.core.executor.wake_up()
    assert len(one.run().tokens["a"]) == 5


def test_nothing_is_sent_while_scheduling_is_paused(one):
    assert len(one.core.step(lambda _: one.core.pause() is None)) == 1
    assert one.core.step(lambda _: True) == []
    assert sent(one) == 1
    one.core.resume()
    assert len(one.run().tokens["a"]) == 5


def test_an_executor_that_failed_ends_the_requests_with_the_next(one):
    error = OSError("gone")

    def goes_on(_):
        one.core.executor.fail(error)
        return True

    (output,) = one.core.step(goes_on)
    assert (len(output.new_tokens), output.error) == (1, None)
    (output,) = one.core.step(goes_on)
    assert output.error is error


def test_a_shutdown_forgets_it(one):
    one.core.step(lambda _: True)
    one.core.shutdown()
    assert one.run().ends["a"].finish_reason == "abort"
    assert not one.core.has_unfinished()


def test_a_policy_that_learns_from_outputs_has_them_before(one, monkeypatch):
    steps = []

    class Learning(type(one.core.scheduler.admission)):
        def observe(self, output):
            steps.append(sent(one))

    one.core.scheduler.admission = Learning()
    for _ in range(3):
        one.core.step(lambda _: True)
    assert steps == [1, 2, 3]


def test_the_last_word_of_a_request_comes_behind_its_tokens(one):
    def goes_on(_):
        assert one.core.abort("a")
        return True

    (first,) = one.core.step(goes_on)
    assert (len(first.new_tokens), first.finish_reason) == (1, None)
    (last,) = one.core.step(lambda _: True)
    assert (last.new_tokens, last.finish_reason) == ((), "abort")
    assert not one.core.has_unfinished()
