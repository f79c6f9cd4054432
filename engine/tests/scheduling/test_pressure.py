"""A thousand requests of mixed length through 64 KV blocks, with aborts and priorities."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

NUM_REQUESTS = 1000
USABLE, BLOCK_SIZE = 64, 4
LONGEST = USABLE * BLOCK_SIZE
PRIORITIES = (-1, 0, 0, 0, 1)


class Crowd:
    """Requests that arrive, and are given up, at random moments of a run."""

    def __init__(self, driver, fakes, source):
        self.driver = driver
        self.fakes = fakes
        self.random = source
        self.priorities = {}
        self.prompts = {}
        self.wanted = {}
        self.aborted = {}
        """Request -> how many tokens it had when it was given up."""
        self.most_waiting = 0

    def arrive(self):
        req_id = f"r{len(self.prompts)}"
        length = self.random.choice([1, 3, 9, 30, 90, 200])
        wanted = self.random.choice([1, 4, 12, 40])
        beginning = (5,) * min(length, self.random.choice([0, 0, 8, 16]))  # some share one
        rest = [self.random.randrange(self.fakes.VOCAB) for _ in range(length - len(beginning))]
        self.prompts[req_id] = (*beginning, *rest)
        self.wanted[req_id] = min(wanted, LONGEST - length)
        self.priorities[req_id] = self.random.choice(PRIORITIES)
        self.driver.add(
            req_id,
            self.prompts[req_id],
            max_tokens=self.wanted[req_id],
            priority=self.priorities[req_id],
        )

    def give_up(self):
        roster = self.driver.scheduler.roster
        live = [req_id for req_id in self.prompts if req_id in roster]
        if live:
            req_id = self.random.choice(live)
            self.aborted[req_id] = len(self.driver.tokens[req_id])
            assert roster.end(req_id, "abort")

    def run(self, count):
        """Let ``count`` come and all end; return how many steps it took."""
        goal = len(self.prompts) + count
        steps = 0
        while len(self.prompts) < goal or len(self.driver.scheduler.roster) or self.driver.flights:
            for _ in range(self.random.choice([0, 1, 2, 8])):
                if len(self.prompts) < goal:
                    self.arrive()
            if self.random.random() < 0.08:
                self.give_up()
            self.step()
            steps += 1
        self.step()
        return steps

    def step(self):
        driver = self.driver
        driver.step()
        driver.worker.plans.clear()
        roster = driver.scheduler.roster
        self.most_waiting = max(self.most_waiting, len(roster.waiting))
        pool = driver.scheduler.blocks.pool
        assert pool.num_free + len(pool.references) == pool.num_usable
        held = [block for request in roster.running for block in request.blocks]
        for flight in driver.flights:  # who ended keeps what a step still writes
            held += [
                block
                for request in flight.requests.values()
                if request.req_id not in roster
                for block in request.blocks
            ]
        assert sum(pool.references.values()) == len(held)


@pytest.fixture(params=[1, 2], ids=["one_step", "two_steps"])
def crowd(request, fakes):
    driver = fakes.Driver(
        num_blocks=USABLE + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        depth=request.param,
        max_model_len=LONGEST,
    )
    return Crowd(driver, fakes, random.Random(20261129 + request.param))


def test_everybody_is_served_and_nothing_is_lost(crowd, fakes):
    driver = crowd.driver
    crowd.run(NUM_REQUESTS)
    assert crowd.most_waiting > 100, "there was pressure"
    assert driver.scheduler.roster.num_preemptions > 50
    assert len(crowd.aborted) > 20
    assert driver.ends.keys() == crowd.prompts.keys()
    for req_id, end in driver.ends.items():
        right = fakes.answer(crowd.prompts[req_id], crowd.wanted[req_id])
        if req_id in crowd.aborted:
            assert end.finish_reason == "abort"
            assert driver.tokens[req_id] == right[: crowd.aborted[req_id]]
        else:
            assert (end.finish_reason, driver.tokens[req_id]) == ("length", right)
    driver.check_idle()


def test_nobody_is_overtaken_by_an_equal(crowd):
    """Of one priority, who came first starts first; so whoever waits moves up."""
    driver = crowd.driver
    crowd.run(400)
    for priority in set(PRIORITIES):
        starts = [
            driver.ends[req_id].metrics.first_scheduled
            for req_id, own in crowd.priorities.items()
            if own == priority and driver.ends[req_id].metrics.first_scheduled is not None
        ]
        assert len(starts) > 10
        assert starts == sorted(starts)


def test_the_totals_add_up(crowd):
    """Each end's figures are what was seen, and each computed token is accounted for."""
    driver = crowd.driver
    crowd.run(300)
    least = 0
    for req_id, end in driver.ends.items():
        metrics = end.metrics
        assert metrics.num_prompt_tokens == len(crowd.prompts[req_id])
        assert metrics.num_generation_tokens >= len(driver.tokens[req_id])
        assert metrics.num_cached_tokens < max(1, metrics.num_prompt_tokens)
        if req_id not in crowd.aborted:
            assert metrics.num_generation_tokens == len(driver.tokens[req_id])
            least += (
                metrics.num_prompt_tokens
                - metrics.num_cached_tokens
                + metrics.num_generation_tokens
                - 1
            )
    ends = driver.ends.values()
    assert sum(end.metrics.num_preemptions for end in ends) == (
        driver.scheduler.roster.num_preemptions
    )
    again = driver.scheduler.roster.num_preemptions * LONGEST
    given_up = sum(LONGEST for _ in crowd.aborted)
    assert least <= driver.worker.computed_tokens <= least + again + given_up


def test_memory_is_flat(crowd):
    """What 150 requests leave behind does not grow with further 150."""
    driver = crowd.driver

    def left():
        for mapping in (driver.ends, driver.tokens, driver.prompts, crowd.prompts, crowd.wanted,
                        crowd.priorities, crowd.aborted):  # fmt: skip
            mapping.clear()
        driver.worker.unheard.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        crowd.run(150)
        before = left()
        crowd.run(150)
        after = left()
    finally:
        tracemalloc.stop()
    assert after < before + 50_000, f"{before} bytes, then {after}"
