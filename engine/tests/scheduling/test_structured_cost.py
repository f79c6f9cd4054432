"""What structured requests add to a step grows with those in it. Counted in lines run."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest
from attrs import evolve
from hardpoint.messages import ModelRunnerOutput
from hardpoint_engine.request import Phase
from hardpoint_engine.scheduling.stopping import StopRule
from hardpoint_engine.structured.grammar import Grammar
from hardpoint_engine.structured.structured_requests import StructuredRequests


class Anything(Grammar):
    """Lets everything come; ``alive`` are its answers."""

    def __init__(self):
        self.alive = weakref.WeakSet()

    def start(self):
        answer = Anything()
        self.alive.add(answer)
        return answer

    def mask(self):
        return b"\xff\xff\xff\xff"

    def accept(self, tokens):
        pass

    @property
    def complete(self):
        return False


class Structured:
    """A scheduler whose requests are all structured, ``running`` of them in each step."""

    def __init__(self, fakes, running):
        self.fakes = fakes
        self.scheduler = fakes.make_scheduler(
            num_blocks=running * 8 + 1,
            block_size=16,
            max_num_seqs=running,
            max_num_batched_tokens=running * 20,
        )
        self.structured = StructuredRequests(self.scheduler.roster)
        self.grammar = Future()

    def add(self, count, grammar, *, max_tokens=100):
        added = []
        for _ in range(count):
            number = len(self.scheduler.roster)
            source = self.fakes.make_request(f"r{number}", range(19), max_tokens=max_tokens)
            rule = StopRule.of(source.sampling, 19, (), 1000)
            source = evolve(source, grammar=grammar)
            added.append(self.scheduler.roster.add(source, rule, ready=False))
            self.structured.add(added[-1])
        return added

    def step(self):
        self.structured.settle()
        plan = self.scheduler.schedule()
        due = self.structured.due(plan)
        assert due.keys() == plan.num_tokens.keys()
        assert len(self.structured.masks(due).req_ids) == len(due)
        ids = tuple(plan.num_tokens)
        output = ModelRunnerOutput(
            step_id=plan.step_id, req_ids=ids, tokens=tuple((7,) for _ in ids)
        )
        return self.scheduler.commit(plan, output)

    def lines(self, steps=16):
        """Return the lines of our own code that ``steps`` run."""

        def work():
            for _ in range(steps):
                assert self.step()

        return self.fakes.lines_run(work)


@pytest.fixture
def done():
    grammar = Future()
    grammar.set_result(Anything())
    return grammar


@pytest.mark.parametrize("ready", [True, False], ids=["for their turn", "for their grammar"])
def test_those_that_wait_cost_nothing(fakes, done, ready):
    alone, crowded = Structured(fakes, 16), Structured(fakes, 16)
    for each in (alone, crowded):
        each.add(16, done)
        each.step()
    crowded.add(3000, done if ready else Future())
    crowded.step()
    assert crowded.lines() <= 1.02 * alone.lines()
    assert len(done.result().alive) == 32  # of those that run


def test_work_is_linear_in_those_that_run(fakes, done):
    few, many = Structured(fakes, 16), Structured(fakes, 128)
    few.add(16, done)
    many.add(128, done)
    assert many.lines() <= 8.5 * few.lines()


def test_nothing_is_kept_of_those_that_ended(fakes, done):
    made = Structured(fakes, 8)
    made.add(8, done, max_tokens=2)
    made.step()
    assert len(done.result().alive) == 8
    assert all(output.finish_reason == "length" for output in made.step())
    gc.collect()
    assert not done.result().alive


def test_one_that_ended_before_its_grammar_was_there_waits_no_longer(fakes):
    made, grammar = Structured(fakes, 8), Future()
    kept, dropped = made.add(2, grammar)
    made.scheduler.roster.end(dropped.req_id, "abort")
    made.structured.settle()
    assert (len(made.structured), kept.phase) == (2, Phase.PREPARING)
    grammar.set_result(Anything())
    made.structured.settle()
    assert (len(made.structured), kept.phase) == (0, Phase.WAITING)
    assert dropped.phase is Phase.FINISHED
