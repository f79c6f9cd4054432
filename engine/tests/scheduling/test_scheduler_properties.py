"""Random lives of many requests: whatever happens, tokens are right and accounts add up."""

from __future__ import annotations

import random

import pytest
from hardpoint_engine.scheduling.admission import AdmissionPolicy, Admit, Wait
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)


class Moody(AdmissionPolicy):
    def __init__(self, source):
        self.source = source

    def admit(self, request, running):
        return Wait() if self.source.random() < 0.3 else Admit()


def machine(fakes):
    class Life(RuleBasedStateMachine):
        @initialize(
            usable=st.sampled_from([8, 8, 8, 12, 30]),
            block_size=st.sampled_from([1, 2, 4]),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(4, 20),
            chunk=st.sampled_from([None, 4, 5]),
            mixed=st.booleans(),
            prefills=st.sampled_from([None, 1, 2]),
            multiple=st.sampled_from([1, 1, 4]),
            caching=st.booleans(),
            reserved=st.integers(1, 2),
            mood=st.none() | st.integers(0, 2**32),
            depth=st.sampled_from([1, 2, 3]),
            tells_tokens=st.booleans(),
            seed=st.integers(0, 2**32),
        )
        def start(self, usable, block_size, max_num_seqs, budget, chunk, mixed, prefills, multiple,
                  caching, reserved, mood, depth, tells_tokens, seed):  # fmt: skip
            note(f"seed {seed}")
            self.random = random.Random(seed)
            self.driver = fakes.Driver(
                num_blocks=usable + reserved,
                block_size=block_size,
                reserved=reserved,
                prefix_caching=caching,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                prefill_chunk_size=chunk,
                mixed_batches=mixed,
                max_prefills_per_step=prefills,
                chunk_multiple=multiple,
                admission=None if mood is None else Moody(random.Random(mood)),
                depth=depth,
                tells_tokens=tells_tokens,
            )
            self.capacity = usable * block_size
            self.wanted = {}
            self.answers = {}
            self.aborted = set()
            self.failed = set()

        @rule(
            share=st.booleans(),
            length=st.integers(1, 20),
            max_tokens=st.integers(1, 20),
            priority=st.integers(-1, 1),
        )
        def add(self, share, length, max_tokens, priority):
            length = min(length, self.capacity - 1)
            prompt = tuple(
                7 if share else self.random.randrange(fakes.VOCAB) for _ in range(length)
            )
            req_id = f"r{len(self.wanted)}"
            self.wanted[req_id] = min(max_tokens, self.capacity - length)
            self.answers[req_id] = fakes.answer(prompt, self.wanted[req_id])
            self.driver.add(req_id, prompt, max_tokens=max_tokens, priority=priority)

        @rule(times=st.integers(1, 6))
        def step(self, times):
            for _ in range(times):
                self.driver.step()

        @precondition(lambda self: self.wanted)
        @rule(data=st.data())
        def abort(self, data):
            req_id = data.draw(st.sampled_from(sorted(self.wanted)))
            live = req_id in self.driver.scheduler.roster
            assert self.driver.scheduler.roster.end(req_id, "abort") == live
            if live:
                self.aborted.add(req_id)

        @rule(fate=st.sampled_from(["done", "done", "done", "lost", "never"]))
        def launch(self, fate):
            driver = self.driver
            if len(driver.flights) < driver.scheduler.depth:
                plan = driver.launch(fate)
                if plan is not None and fate != "done":
                    self.failed |= plan.num_tokens.keys()

        @precondition(lambda self: self.wanted)
        @rule()
        def land(self):
            if self.driver.flights:
                self.driver.land()

        @precondition(lambda self: self.wanted)
        @rule()
        def abort_in_flight(self):
            """An ended request keeps its blocks until its step has landed."""
            driver = self.driver
            known = sorted(req_id for each in driver.flights for req_id in each.plan.num_tokens)
            if not known:
                return
            victim = self.random.choice(known)
            (flight,) = (each for each in driver.flights if victim in each.requests)
            request = flight.requests[victim]
            if driver.scheduler.roster.end(victim, "abort"):
                self.aborted.add(victim)
                assert all(block in driver.scheduler.blocks.pool.references
                           for block in request.blocks)  # fmt: skip
                assert request.blocks

        @rule()
        def lose_the_cache(self):
            while self.driver.flights:
                self.driver.land()
            self.driver.scheduler.preempt_all()
            self.driver.scheduler.blocks.clear_cache()
            self.driver.worker.slots.clear()

        @rule()
        def change_the_weights(self):
            self.driver.scheduler.blocks.weight_epoch += 1

        @invariant()
        def accounts_add_up(self):
            if not hasattr(self, "driver"):
                return
            roster, pool = self.driver.scheduler.roster, self.driver.scheduler.blocks.pool
            held = {}
            holders = [*roster.running]
            for step in roster.in_flight.values():
                holders += [each for each in step.values() if each not in holders]
            for request in holders:
                for block in request.blocks:
                    held[block] = held.get(block, 0) + 1
            assert dict(pool.references) == held
            assert pool.num_free + len(held) == pool.num_usable
            assert len(roster) == len(roster.running) + len(roster.waiting)
            assert not any(request.blocks for request in roster.waiting)
            flying = [id(each) for step in roster.in_flight.values() for each in step.values()]
            assert len(flying) == len(set(flying)), "a request is in one step at most"
            ranks = [request.rank for request in roster.running]
            assert ranks == sorted(ranks)
            for req_id, tokens in self.driver.tokens.items():
                assert tokens == self.answers[req_id][: len(tokens)], "a gap, a repeat or a change"

        def teardown(self):
            if not hasattr(self, "driver"):
                return
            driver = self.driver.run()
            for req_id, count in self.wanted.items():
                end = driver.ends[req_id]
                if req_id in self.aborted:
                    assert end.finish_reason == "abort"
                elif req_id in self.failed:  # and no other
                    assert end.finish_reason == "error"
                else:
                    assert end.finish_reason == "length"
                    assert len(driver.tokens[req_id]) == count
            driver.check_idle()
            assert set(driver.worker.copies) <= set(driver.ends)

    return Life


def live(fakes, **options):
    run_state_machine_as_test(
        machine(fakes),
        settings=settings(
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_random_lives(fakes):
    live(fakes, max_examples=100, derandomize=True)


@pytest.mark.slow
def test_many_random_lives(fakes):
    """A failure prints the example and the blob that replays it."""
    live(fakes, max_examples=3000)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_starves_with_eight_blocks(fakes, seed, depth):
    """Requests keep coming, and each ends within a bounded number of steps after it came."""
    source = random.Random(seed)
    driver = fakes.Driver(num_blocks=9, max_num_seqs=6, max_num_batched_tokens=16, depth=depth)
    came, took = {}, {}
    for step in range(600):
        if len(driver.scheduler.roster) < 8:
            length = source.randrange(1, 20)
            req_id = f"r{len(came)}"
            prompt = tuple(source.randrange(fakes.VOCAB) for _ in range(length))
            driver.add(req_id, prompt, max_tokens=source.randrange(1, 32 - length))
            came[req_id] = step
        driver.step()
        for req_id in driver.ends.keys() - took.keys():
            took[req_id] = step - came[req_id]
    driver.run()
    assert driver.scheduler.roster.num_preemptions > 10, f"seed {seed}: no pressure"
    assert max(took.values()) < 8 * 40 * depth, (
        f"seed {seed}: a request waited {max(took.values())} steps"
    )
    for req_id, prompt in driver.prompts.items():
        tokens = driver.tokens[req_id]
        assert tokens == fakes.answer(prompt, len(tokens)), f"seed {seed}: {req_id}"
    driver.check_idle()
