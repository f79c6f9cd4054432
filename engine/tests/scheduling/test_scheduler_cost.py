"""A step's work grows with the requests in it, and with nothing else. Counted in lines run."""

from __future__ import annotations

import pytest
from hardpoint.messages import ModelRunnerOutput
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


def test_those_that_wait_cost_nothing(lines_of):
    none, some = lines_of(16, 0), lines_of(16, 3000)
    assert some <= 1.02 * none
