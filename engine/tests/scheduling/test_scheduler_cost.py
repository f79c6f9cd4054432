"""A step's work grows with the requests in it, and with nothing else. Counted in lines run."""

from __future__ import annotations

import pytest
from hardpoint.messages import ModelRunnerOutput
from hardpoint_engine.scheduling.admission import AdmissionPolicy, Wait
from hardpoint_engine.scheduling.stopping import StopRule


class Steps:
    """Steps in which all that run generate a token."""

    def __init__(self, fakes, running, waiting):
        self.scheduler = fakes.make_scheduler(
            num_blocks=running * 8 + 1,
            block_size=16,
            max_num_seqs=running,
            max_num_batched_tokens=running * 20,
        )
        self.running = running
        for number in range(running + waiting):
            prompt = [number % fakes.VOCAB, *range(19)]
            source = fakes.make_request(f"r{number}", prompt, max_tokens=100)
            rule = StopRule.of(source.sampling, len(prompt), (), 1000)
            self.scheduler.roster.add(source, rule)
        self.step()

    def step(self):
        plan = self.scheduler.schedule()
        ids = tuple(plan.num_tokens)
        assert len(ids) == self.running
        output = ModelRunnerOutput(
            step_id=plan.step_id, req_ids=ids, tokens=tuple((7,) for _ in ids)
        )
        assert len(self.scheduler.commit(plan, output)) == self.running

    def run(self, steps=16):
        """Run so many that blocks are named and added, too."""
        for _ in range(steps):
            self.step()


@pytest.fixture
def lines_of(fakes):
    return lambda running, waiting: fakes.lines_run(Steps(fakes, running, waiting).run)


def test_work_is_linear_in_those_that_run(lines_of):
    few, many = lines_of(16, 0), lines_of(128, 0)
    assert few > 16 * 16
    assert many <= 8 * few


@pytest.mark.parametrize("running", [1, 16])
def test_ten_thousand_that_wait_cost_nothing(lines_of, running):
    none, many = lines_of(running, 0), lines_of(running, 10_000)
    assert many <= 1.02 * none


def test_to_come_and_to_be_given_up_among_ten_thousand_costs_what_it_does_alone(fakes):
    """On average: those that were given up are swept together, when they are most."""

    def cost(waiting, count):
        """Lines for each of ``count`` that come, wait and are given up."""
        roster = Steps(fakes, 1, waiting).scheduler.roster

        def come_and_go():
            for number in range(count):
                source = fakes.make_request(f"new{number}", [1, 2, 3])
                roster.add(source, StopRule.of(source.sampling, 3, (), 1000))
            for number in range(count):
                assert roster.end(f"new{number}", "abort")

        return fakes.lines_run(come_and_go) / count

    few, many, all_of_them = cost(0, 50), cost(10_000, 50), cost(0, 2000)
    assert many <= few + 1
    assert all_of_them <= few + 5


class Never(AdmissionPolicy):
    """Lets nobody start, and counts whom it was asked about."""

    asked = 0

    def admit(self, request, running):
        self.asked += 1
        return Wait()


def test_a_policy_is_not_asked_about_all_that_wait(fakes):
    steps = Steps(fakes, 4, 10_000)
    steps.scheduler.admission = policy = Never()
    for number in range(4):
        steps.scheduler.roster.end(f"r{number}", "abort")
    steps.scheduler.schedule()
    assert policy.asked == 4  # as many as might have run
