"""Several steps in flight: who is in which, what they may hold, and what a failure reaches."""

from __future__ import annotations

import pytest
from attrs import evolve

PROMPTS = {
    "a": tuple(range(1, 20)),
    "b": (5,),
    "c": tuple(range(30, 60)),
    "d": tuple(range(1, 12)),
    "e": (9, 9, 9),
}


@pytest.fixture
def driver(fakes):
    """A pipeline of two stages."""
    return fakes.Driver(depth=2, tells_tokens=True)


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 4},
        {"prefill_chunk_size": 1},
        {"block_size": 1},
        {"num_blocks": 13},
        {"num_blocks": 12, "prefix_caching": False},
        {"num_groups": 3},
        {"mixed_batches": False},
        {"mixed_batches": False, "num_blocks": 13, "prefill_chunk_size": 3},
        {"max_prefills_per_step": 1},
        {"chunk_multiple": 8, "prefill_chunk_size": 12},
        {"chunked": False},
    ],
    ids=str,
)
def test_the_answers_are_those_of_one_step_at_a_time(fakes, options, depth):
    driver = fakes.Driver(depth=depth, tells_tokens=True, **options)
    for req_id, prompt in PROMPTS.items():
        driver.add(req_id, prompt, max_tokens=12)
    driver.run()
    for req_id, prompt in PROMPTS.items():
        assert driver.tokens[req_id] == fakes.answer(prompt, 12)
        assert driver.ends[req_id].finish_reason == "length"
    driver.check_idle()


def ids(plan):
    return sorted(plan.num_tokens)


def test_the_steps_share_what_runs_evenly(fakes, driver):
    for n in range(5):
        driver.add(f"r{n}", (n,), max_tokens=20)
    assert ids(driver.launch()) == ["r0", "r1", "r2"]
    assert ids(driver.launch()) == ["r3", "r4"]
    driver.land()
    for n in range(5, 9):
        driver.add(f"r{n}", (n,), max_tokens=20)
    assert ids(driver.launch()) == ["r0", "r1", "r2", "r5", "r6"]
    driver.land()
    assert ids(driver.launch()) == ["r3", "r4", "r7", "r8"]
    for _ in range(6):
        driver.land()
        assert len(driver.launch().num_tokens) in (4, 5)
    driver.run()
    for n in range(9):
        assert driver.tokens[f"r{n}"] == fakes.answer((n,), 20)


def test_those_who_cannot_start_do_not_unbalance_the_steps(fakes):
    """Sixteen wait for room that four running requests hold: still two in each step."""
    driver = fakes.Driver(depth=2, num_blocks=17, max_num_seqs=32)
    for n in range(4):
        driver.add(f"r{n}", tuple(range(n, n + 12)), max_tokens=4)
    driver.launch()
    driver.launch()
    for n in range(4, 20):
        driver.add(f"r{n}", tuple(range(n, n + 12)), max_tokens=4)
    for _ in range(4):
        driver.land()
        assert len(driver.launch().num_tokens) == 2
    driver.run()
    driver.check_idle()


def test_nor_do_those_beyond_the_number_that_may_run(fakes):
    driver = fakes.Driver(depth=2, max_num_seqs=4)
    for n in range(10):
        driver.add(f"r{n}", (n,), max_tokens=3)
    assert ids(driver.launch()) == ["r0", "r1"]
    assert ids(driver.launch()) == ["r2", "r3"]
    driver.run()


def test_where_fewer_could_start_than_wait_the_next_steps_share_evenly(fakes):
    """All four that there is room for start in one step, since twenty wait."""
    driver = fakes.Driver(depth=2, max_num_seqs=32, num_blocks=17)
    for n in range(20):
        driver.add(f"r{n:02}", tuple(range(n, n + 13)), max_tokens=3)
    assert ids(driver.launch()) == ["r00", "r01", "r02", "r03"]
    assert driver.launch() is None
    driver.land()
    assert ids(driver.launch()) == ["r00", "r01"]
    assert ids(driver.launch()) == ["r02", "r03"]
    driver.run()
    driver.check_idle()


def test_a_request_is_in_one_step_at_most(driver):
    driver.add("a", (1, 2), max_tokens=3)
    assert ids(driver.launch()) == ["a"]
    assert driver.launch() is None
    driver.land()
    assert ids(driver.launch()) == ["a"]


def test_chunks_of_one_prompt_follow_each_others_results(fakes):
    driver = fakes.Driver(depth=2, max_num_batched_tokens=8)
    driver.add("a", tuple(range(20)), max_tokens=2)
    assert driver.launch().num_tokens == {"a": 8}
    assert driver.launch() is None
    driver.run()
    assert driver.tokens["a"] == fakes.answer(tuple(range(20)), 2)


def test_a_request_that_ends_in_flight_keeps_its_blocks_until_the_step_has_landed(fakes, driver):
    pool = driver.scheduler.blocks.pool
    request = driver.add("a", (1, 2, 3), max_tokens=9)
    driver.add("b", (4, 5), max_tokens=9)
    driver.launch()
    driver.launch()
    assert driver.scheduler.roster.end("a", "abort")
    driver.take(driver.scheduler.roster.take_ended())
    blocks = set(request.blocks)
    assert len(blocks) == 1
    assert blocks < set(pool.references)
    driver.land()
    assert not request.blocks
    assert not blocks & set(pool.references)
    driver.run()
    assert driver.tokens["a"] == ()
    assert driver.tokens["b"] == fakes.answer((4, 5), 9)
    driver.check_idle()


@pytest.mark.parametrize("fate", ["lost", "never"])
def test_so_does_one_whose_step_fails(driver, fate):
    request = driver.add("a", (1, 2, 3), max_tokens=9)
    driver.launch(fate)
    driver.scheduler.roster.end("a", "abort")
    assert request.blocks
    driver.land()
    assert not request.blocks
    driver.take(driver.scheduler.roster.take_ended())
    assert driver.ends["a"].finish_reason == "abort"
    driver.check_idle()


def test_the_last_that_is_not_in_flight_is_preempted(fakes):
    """Three requests of two blocks fill the pool; the first needs a third block."""
    driver = fakes.Driver(depth=2, num_blocks=7, tells_tokens=True)
    for name in "abc":
        driver.add(name, tuple(map(ord, name * 6)), max_tokens=6)
    assert ids(driver.launch()) == ["a", "b"]
    assert ids(driver.launch()) == ["c"]
    while driver.scheduler.roster.num_preemptions == 0:
        flying = set(driver.flights[-1].requests)
        driver.land()
        before = {each.req_id for each in driver.scheduler.roster.running}
        driver.launch()
        gone = before - {each.req_id for each in driver.scheduler.roster.running} - set(driver.ends)
        assert not gone & flying
    driver.run()
    for name in "abc":
        assert driver.tokens[name] == fakes.answer(driver.prompts[name], 6)
    driver.check_idle()


def test_one_that_lacks_room_waits_for_a_step_in_flight(fakes):
    """``b`` needs a block; ``a``, in flight, has all the others and is about to end."""
    driver = fakes.Driver(depth=2, num_blocks=4, prefix_caching=False)  # 3 usable blocks of 4
    driver.add("a", (1, 2, 3, 4, 5), max_tokens=3)
    driver.add("b", (6, 7, 8), max_tokens=4)
    driver.launch()
    for expected in ("b", "a", "b", "a"):
        assert ids(driver.launch()) == [expected]
        driver.land()
    assert [ids(flight.plan) for flight in driver.flights] == [["a"]]
    assert driver.launch() is None
    driver.run()
    assert driver.scheduler.roster.num_preemptions == 0
    assert driver.tokens["a"] == fakes.answer((1, 2, 3, 4, 5), 3)
    assert driver.tokens["b"] == fakes.answer((6, 7, 8), 4)
    driver.check_idle()


def test_and_nobody_overtakes_it(fakes):
    driver = fakes.Driver(depth=2, prefill_chunk_size=8)
    pool = driver.scheduler.blocks.pool
    driver.add("a", (1, 2), max_tokens=6)
    driver.add("b", tuple(range(16)), max_tokens=1)
    driver.launch()
    driver.launch()
    driver.land()
    driver.launch()
    driver.land()  # a is in flight, b wants two blocks
    taken = pool.allocate(pool.num_free - 1)
    driver.add("c", (3,), max_tokens=1)
    assert driver.launch() is None
    pool.release(taken)
    assert ids(driver.launch()) == ["b", "c"]
    driver.run()
    driver.check_idle()


def test_a_failure_ends_its_own_step_and_none_before(fakes):
    driver = fakes.Driver(depth=3)
    for req_id in "abc":
        driver.add(req_id, (ord(req_id),), max_tokens=4)
    driver.launch()
    driver.launch("lost")
    driver.launch()
    driver.land()
    assert len(driver.tokens["a"]) == 1
    driver.land()
    assert {req_id: str(end.error) for req_id, end in driver.ends.items()} == {"b": "lost"}
    driver.run()
    for req_id in "ac":
        assert driver.tokens[req_id] == fakes.answer((ord(req_id),), 4)
    driver.check_idle()


def test_what_a_failed_plan_said_is_not_said_of_an_id_that_came_back(driver):
    """The end of the first ``a`` is in a plan that fails after the second ``a`` has started."""
    driver.add("a", (1,), max_tokens=1)
    driver.add("b", (2,), max_tokens=9)
    driver.launch()
    driver.land()
    driver.take(driver.scheduler.roster.take_ended())
    plan = driver.launch("lost")
    assert plan.finished == {"a"}
    del driver.ends["a"]
    driver.add("a", (3,), max_tokens=3)
    assert ids(driver.launch()) == ["a"]
    driver.land()
    driver.land()
    assert driver.launch().finished == {"b"}


def test_a_preemption_that_a_later_plan_has_overtaken_is_not_said_again(driver):
    driver.add("a", (1,), max_tokens=9)
    driver.add("b", (2,), max_tokens=9)
    driver.launch()
    driver.launch()
    driver.land()
    driver.land()
    driver.scheduler.preempt_all()
    driver.scheduler.limits = evolve(driver.scheduler.limits, max_num_seqs=1)
    assert driver.launch("lost").preempted == {"b"}
    driver.scheduler.limits = evolve(driver.scheduler.limits, max_num_seqs=16)
    assert driver.launch().running.resumed == {"b"}
    driver.land()
    driver.land()
    assert driver.launch().preempted == frozenset()


class TestTold:
    def test_only_where_it_is_asked_for(self, fakes):
        driver = fakes.Driver(depth=2)
        driver.add("a", (1, 2), max_tokens=3)
        driver.run()
        assert all(plan.running.new_tokens == () for plan in driver.worker.plans)

    def test_each_token_once(self, fakes):
        driver = fakes.Driver(depth=2, tells_tokens=True, max_num_batched_tokens=4)
        driver.add("a", (1, 2, 3, 4, 5, 6), max_tokens=4)
        driver.run()
        told = [plan.running.new_tokens for plan in driver.worker.plans if not plan.new]
        assert told[0] == ((),)  # the rest of the prompt
        assert [row for (row,) in told[1:]] == [(token,) for token in driver.tokens["a"][:-1]]

    def test_a_resumed_request_is_told_what_it_was_not(self, driver):
        driver.add("a", (1, 2), max_tokens=6)
        driver.step()
        driver.step()
        driver.scheduler.preempt_all()
        plan = driver.launch()
        assert plan.running.resumed == {"a"}
        assert plan.running.new_tokens == (driver.tokens["a"][-1:],)
        driver.run()
