"""What is planned, step by step, against a worker that checks every plan."""

from __future__ import annotations

import random

import pytest
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.messages import MessageError, ModelRunnerOutput
from hardpoint_engine.scheduling.admission import AdmissionPolicy, Admit, Refuse, Wait
from hardpoint_engine.scheduling.scheduler import AdmissionError
from hardpoint_engine.scheduling.step_draft import StepLimits

PROMPTS = {
    "a": tuple(range(1, 20)),
    "b": (5,),
    "c": tuple(range(30, 60)),
    "d": tuple(range(1, 12)),
}


def run_all(fakes, **options):
    driver = fakes.Driver(**options)
    for req_id, prompt in PROMPTS.items():
        driver.add(req_id, prompt, max_tokens=12)
    driver.run()
    for req_id, prompt in PROMPTS.items():
        assert driver.tokens[req_id] == fakes.answer(prompt, 12)
        assert driver.ends[req_id].finish_reason == "length"
    driver.check_idle()
    return driver


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 7},
        {"block_size": 1},
        {"block_size": 16},
        {"num_blocks": 13},
        {"num_blocks": 12, "prefix_caching": False},
        {"num_groups": 3},
        {"reserved": 5},
        {"mixed_batches": False},
        {"mixed_batches": False, "num_blocks": 13, "prefill_chunk_size": 3},
        {"max_prefills_per_step": 1},
        {"max_prefills_per_step": 1, "mixed_batches": False, "max_num_batched_tokens": 8},
        {"chunk_multiple": 8, "prefill_chunk_size": 12},
        {"chunk_multiple": 8, "max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"chunked": False},
    ],
    ids=str,
)
def test_every_limit_gives_the_same_answers(fakes, options):
    run_all(fakes, **options)


def test_a_prompt_is_computed_in_chunks_while_others_generate(fakes):
    driver = fakes.Driver(max_num_batched_tokens=8)
    driver.add("short", (1, 2), max_tokens=20)
    driver.step()
    driver.add("long", tuple(range(20)), max_tokens=2)
    chunks = [dict(driver.step().num_tokens) for _ in range(4)]
    assert chunks == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}, {
        "short": 1, "long": 1}]  # fmt: skip


def test_generating_requests_come_before_an_older_prompt(fakes):
    driver = fakes.Driver(max_num_batched_tokens=8, num_blocks=33)
    driver.add("young", (1, 2), max_tokens=20, priority=1)
    driver.step()
    driver.add("old", tuple(range(20)), max_tokens=2, priority=0)
    plan = driver.step()
    plan = driver.step()
    assert [request.req_id for request in driver.scheduler.roster.running] == ["old", "young"]
    assert plan.num_tokens == {"old": 7, "young": 1}


def test_the_last_running_is_preempted_and_resumes_from_the_cache(fakes):
    driver = fakes.Driver(num_blocks=9)  # 8 usable blocks of 4
    driver.add("first", tuple(range(10)), max_tokens=20)
    driver.add("second", tuple(range(50, 62)), max_tokens=10)
    driver.run()
    assert driver.tokens["first"] == fakes.answer(driver.prompts["first"], 20)
    assert driver.tokens["second"] == fakes.answer(driver.prompts["second"], 10)
    assert driver.ends["first"].metrics.num_preemptions == 0
    assert driver.ends["second"].metrics.num_preemptions > 0
    assert driver.worker.resumptions > 0
    driver.check_idle()


def test_finished_ids_are_said_once_with_the_next_plan(fakes):
    driver = fakes.Driver()
    driver.add("a", (1, 2), max_tokens=1)
    driver.add("b", (1, 2), max_tokens=3)
    plans = [driver.step() for _ in range(3)]
    assert [plan.finished for plan in plans] == [frozenset(), {"a"}, frozenset()]
    driver.add("c", (9,), max_tokens=1)
    assert driver.step().finished == {"b"}


def test_an_id_may_come_back_at_once(fakes):
    driver = fakes.Driver()
    driver.add("a", (1, 2), max_tokens=9)
    driver.step()
    assert driver.scheduler.roster.end("a", "abort")
    driver.take(driver.scheduler.roster.take_ended())
    del driver.ends["a"]
    driver.add("a", (3, 4, 5), max_tokens=2)
    plan = driver.step()
    assert plan.finished == {"a"}
    assert plan.new[0].prompt == (3, 4, 5)
    driver.run()
    assert driver.tokens["a"] == fakes.answer((3, 4, 5), 2)


def test_an_aborted_request_gets_nothing_from_the_step_in_flight(fakes):
    driver = fakes.Driver()
    driver.add("a", (1, 2))
    driver.add("b", (3, 4))
    plan = driver.scheduler.schedule()
    assert driver.scheduler.roster.end("a", "abort")
    assert not driver.scheduler.roster.end("a", "abort")
    driver.add("a2", (1, 2))
    driver.take(driver.scheduler.commit(plan, driver.worker.execute(plan)))
    driver.take(driver.scheduler.roster.take_ended())
    assert driver.tokens["a"] == ()
    assert driver.ends["a"].finish_reason == "abort"
    driver.run()
    assert driver.tokens["b"] == fakes.answer((3, 4), 8)
    assert driver.tokens["a2"] == fakes.answer((1, 2), 8)
    driver.check_idle()


def test_a_failed_step_ends_its_requests_alone_and_says_finished_again(fakes):
    driver = fakes.Driver(max_num_seqs=2)
    driver.add("z", (1,), max_tokens=1)
    driver.add("a", (1, 2))
    driver.step()
    driver.add("b", (3, 4))
    driver.add("c", (5, 6))
    plan = driver.scheduler.schedule()
    assert plan.finished == {"z"}
    error = MessageError("broken")
    driver.take(driver.scheduler.fail(plan, error))
    assert {req_id: end.error for req_id, end in driver.ends.items() if end.error} == {
        "a": error,
        "b": error,
    }
    driver.worker.last_step += 1  # it never heard of that step
    assert driver.step().finished == {"z", "a", "b"}
    driver.run()
    assert driver.tokens["c"] == fakes.answer((5, 6), 8)
    driver.check_idle()


def result_of(plan, **changes):
    values = {
        "step_id": plan.step_id,
        "req_ids": tuple(plan.num_tokens),
        "tokens": tuple((1,) for _ in plan.num_tokens),
    }
    return ModelRunnerOutput(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_id": 99}, "step 99"),
        ({"req_ids": ("a", "x")}, "'x'"),
        ({"req_ids": ("a", "a")}, "1 different"),
        ({"tokens": ((1,),)}, "1 rows"),
    ],
)
def test_a_result_of_another_step_changes_nothing(fakes, changes, message):
    driver = fakes.Driver()
    driver.add("a", (1, 2))
    driver.add("b", (3, 4))
    plan = driver.scheduler.schedule()
    with pytest.raises(MessageError, match=message):
        driver.scheduler.commit(plan, result_of(plan, **changes))
    driver.take(driver.scheduler.commit(plan, driver.worker.execute(plan)))
    driver.run()
    assert driver.tokens["a"] == fakes.answer((1, 2), 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"req_ids": ("b",), "tokens": ((1,),)}, "no result"),
        ({"tokens": ((), (1,))}, "no token though"),
    ],
)
def test_a_request_without_its_result_ends_alone(fakes, changes, message):
    driver = fakes.Driver()
    driver.add("a", (1, 2))
    driver.add("b", (3, 4), max_tokens=2)
    plan = driver.scheduler.schedule()
    driver.take(driver.scheduler.commit(plan, result_of(plan, **changes)))
    assert isinstance(driver.ends["a"].error, MessageError)
    assert message in str(driver.ends["a"].error)
    assert driver.tokens["b"] == (1,)
    assert "a" in driver.scheduler.schedule().finished


def test_tokens_for_an_unfinished_prompt_are_a_fault(fakes):
    driver = fakes.Driver(prefill_chunk_size=1)
    driver.add("a", (1, 2))
    plan = driver.scheduler.schedule()
    driver.take(driver.scheduler.commit(plan, result_of(plan)))
    assert "before its prompt was computed" in str(driver.ends["a"].error)
    driver.check_idle()


def test_several_tokens_in_one_step_stop_at_the_right_one(fakes):
    driver = fakes.Driver()
    driver.add("a", (1, 2), max_tokens=3)
    plan = driver.scheduler.schedule()
    driver.take(driver.scheduler.commit(plan, result_of(plan, tokens=((7, 8, 9, 10),))))
    assert driver.tokens["a"] == (7, 8, 9)
    assert driver.ends["a"].finish_reason == "length"


def test_waiting_requests_go_by_priority_then_arrival(fakes):
    driver = fakes.Driver(max_num_seqs=1)
    for req_id, priority in (("late", 1), ("x", 0), ("soon", -1), ("y", 0)):
        driver.add(req_id, (1,), max_tokens=1, priority=priority)
    driver.run()
    assert list(driver.ends) == ["soon", "x", "y", "late"]


def test_nobody_overtakes_a_request_that_lacks_room(fakes):
    driver = fakes.Driver(num_blocks=9)
    driver.add("a", tuple(range(20)), max_tokens=5)
    driver.step()
    driver.add("big", tuple(range(40, 56)), max_tokens=2)
    driver.add("small", (1,), max_tokens=1)
    driver.step()
    assert [r.req_id for r in driver.scheduler.roster.running] == ["a"]
    driver.run()
    assert list(driver.ends).index("a") == 0


def test_a_stream_of_short_prompts_cannot_starve_a_long_one(fakes):
    driver = fakes.Driver(
        max_num_batched_tokens=12, max_num_seqs=8, chunk_multiple=8, num_blocks=129
    )
    driver.add("long", tuple(range(60)), max_tokens=1)
    for count in range(40):
        driver.add(f"s{count}", (count % 90, 2), max_tokens=10)
        driver.step()
    assert driver.tokens["long"] == fakes.answer(tuple(range(60)), 1)


def test_after_a_preemption_nobody_starts_in_the_same_step(fakes):
    driver = fakes.Driver(num_blocks=9, max_num_seqs=2)
    driver.add("a", tuple(range(14)), max_tokens=18)
    driver.add("b", tuple(range(50, 62)), max_tokens=18)
    driver.step()
    driver.add("first", (7,), max_tokens=5, priority=-1)
    while not driver.scheduler.roster.num_preemptions:
        plan = driver.step()
    assert plan.preempted == {"b"}
    assert not plan.new
    assert [new.req_id for new in driver.step().new] == ["first"]


def test_a_preempted_request_waits_for_room_to_grow_in(fakes):
    source = random.Random(1)
    driver = fakes.Driver(num_blocks=17, prefix_caching=False)
    pool, running = driver.scheduler.blocks.pool, driver.scheduler.roster.running
    resumed = 0
    for n in range(600):
        if len(driver.scheduler.roster) < 6:
            driver.add(f"r{n}", (n % 90,) * source.randrange(1, 20), max_tokens=20)
        plan = driver.scheduler.schedule()
        if len(plan.running.resumed) == 1 and not plan.new:
            resumed += 1
            assert pool.num_free >= len(running) - 1
        driver.take(driver.scheduler.commit(plan, driver.worker.execute(plan)))
    assert resumed > 10


class TestStops:
    def tokens_of(self, fakes, count=8):
        return fakes.answer((1, 2, 3), count)

    def test_the_models_end(self, fakes):
        answer = self.tokens_of(fakes)
        driver = fakes.Driver(eos_ids=(answer[3],))
        driver.add("a", (1, 2, 3))
        driver.add("b", (1, 2, 3), ignore_eos=True)
        driver.run()
        assert driver.tokens["a"] == answer[:4]
        assert (driver.ends["a"].finish_reason, driver.ends["a"].stop_reason) == ("stop", None)
        assert driver.tokens["b"] == answer
        assert driver.ends["b"].finish_reason == "length"

    def test_the_requests_own_ids(self, fakes):
        answer = self.tokens_of(fakes)
        driver = fakes.Driver()
        driver.add("a", (1, 2, 3), stop_token_ids=(answer[2],))
        driver.run()
        assert driver.tokens["a"] == answer[:3]
        assert (driver.ends["a"].finish_reason, driver.ends["a"].stop_reason) == ("stop", answer[2])

    def test_not_before_min_tokens(self, fakes):
        answer = self.tokens_of(fakes)
        assert answer[1] not in answer[2:]
        driver = fakes.Driver(eos_ids=(answer[1],))
        driver.add("a", (1, 2, 3), min_tokens=2)
        driver.add("b", (1, 2, 3), min_tokens=1)
        driver.run()
        assert driver.tokens["a"] == answer
        assert driver.tokens["b"] == answer[:2]

    def test_the_context_ends(self, fakes):
        driver = fakes.Driver(max_model_len=7)
        driver.add("a", (1, 2, 3), max_tokens=None)
        driver.add("b", (1, 2, 3), max_tokens=100)
        driver.run()
        assert driver.tokens["a"] == driver.tokens["b"] == self.tokens_of(fakes, 4)
        assert driver.ends["a"].finish_reason == driver.ends["b"].finish_reason == "length"

    def test_a_stop_on_the_last_token_is_a_stop(self, fakes):
        answer = self.tokens_of(fakes)
        driver = fakes.Driver(eos_ids=(answer[-1],))
        driver.add("a", (1, 2, 3))
        driver.run()
        assert driver.ends["a"].finish_reason == "stop"


class Gate(AdmissionPolicy):
    def __init__(self):
        self.decisions = {}
        self.asked = []

    def admit(self, request, running):
        self.asked.append((request.req_id, [other.req_id for other in running], len(running)))
        decision = self.decisions.get(request.req_id, Admit())
        if isinstance(decision, Exception):
            raise decision
        return decision


def test_a_policy_holds_back_and_turns_away(fakes):
    gate = Gate()
    driver = fakes.Driver(admission=gate)
    gate.decisions = {"held": Wait(), "bad": Refuse("not today")}
    for req_id in ("held", "bad", "good"):
        driver.add(req_id, (1, 2), max_tokens=2)
    driver.step()
    assert [entry[0] for entry in gate.asked] == ["held", "bad", "good"]
    assert isinstance(driver.ends["bad"].error, InvalidRequestError)
    assert "not today" in str(driver.ends["bad"].error)
    assert driver.tokens["good"]
    gate.decisions = {}
    driver.step()
    assert gate.asked[-1] == ("held", ["good"], 1)
    driver.run()
    assert driver.tokens["held"] == fakes.answer((1, 2), 2)
    driver.check_idle()


@pytest.mark.parametrize("fault", [ZeroDivisionError("oops"), "yes"])
def test_a_broken_policy_ends_the_request_it_was_asked_about(fakes, fault):
    gate = Gate()
    driver = fakes.Driver(admission=gate)
    gate.decisions = {"a": fault}
    driver.add("a", (1, 2))
    driver.add("b", (1, 2))
    driver.run()
    error = driver.ends["a"].error
    assert isinstance(error, AdmissionError)
    assert "Gate" in str(error)
    assert error.__cause__ is (fault if isinstance(fault, Exception) else None)
    assert driver.tokens["b"] == fakes.answer((1, 2), 8)


def test_when_every_policy_says_wait_there_is_no_plan(fakes):
    gate = Gate()
    driver = fakes.Driver(admission=gate)
    gate.decisions = {"a": Wait()}
    driver.add("a", (1, 2))
    assert driver.step() is None
    assert len(driver.scheduler.roster) == 1


def test_at_most_as_many_are_held_back_as_may_run(fakes):
    gate = Gate()
    driver = fakes.Driver(admission=gate, max_num_seqs=3)
    gate.decisions = {f"r{n}": Wait() for n in range(100)}
    for n in range(100):
        driver.add(f"r{n}", (1,))
    driver.step()
    assert [entry[0] for entry in gate.asked] == ["r0", "r1", "r2"]


def test_after_the_cache_is_lost_everything_is_computed_again(fakes):
    driver = fakes.Driver()
    driver.add("a", tuple(range(10)), max_tokens=20)
    driver.add("b", (4, 5), max_tokens=20)
    for _ in range(5):
        driver.step()
    driver.scheduler.preempt_all()
    driver.scheduler.blocks.clear_cache()
    driver.worker.slots.clear()
    driver.run()
    assert driver.tokens["a"] == fakes.answer(tuple(range(10)), 20)
    assert driver.tokens["b"] == fakes.answer((4, 5), 20)
    assert driver.worker.resumptions == 2


def test_a_multiple_that_no_step_can_hold_is_refused():
    with pytest.raises(ConfigError, match=r"multiples of 16.*max_num_batched_tokens \(now 8\)"):
        StepLimits(max_num_seqs=1, max_num_batched_tokens=8, chunk_multiple=16)


def test_many_waiting_cost_nothing(fakes):
    """A step looks at the best waiting requests only, and the dead ones go away."""
    driver = fakes.Driver(max_num_seqs=2, num_blocks=200)
    for n in range(1000):
        driver.add(f"r{n}", (n % 90,), max_tokens=2)
    waiting = driver.scheduler.roster.waiting
    looked_at = []
    best = waiting.best
    waiting.best = lambda: looked_at.append(1) or best()
    driver.step()
    assert len(looked_at) == 2
    for n in range(2, 990):
        driver.scheduler.roster.end(f"r{n}", "abort")
    assert len(waiting) == 10
    assert len(waiting._heap) <= 21
    waiting.best = best
    driver.run()
    assert sum(end.finish_reason == "length" for end in driver.ends.values()) == 12
