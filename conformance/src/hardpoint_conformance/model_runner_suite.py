"""The ModelRunner suite: what comes out of steps, against an oracle. Runs through an executor."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.model_runner import ModelRunner

from hardpoint_conformance.contract import expect
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.suite import Suite

PROMPTS = ((5, 9, 3, 77, 20), (11, 4), (60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70), (2, 3, 2, 3))


class ModelRunnerSuite(Suite):
    """Greedy ids and scores, batches, chunks, preemption, prefixes, draws, masks, extras."""

    contract: ClassVar[str] = "model runner"

    @property
    def bench(self) -> Bench:
        """A group of workers that can execute, its oracle and its driver; shared by tests."""
        return Bench.of(self.subject)

    def test_greedy_ids_are_the_oracles(self) -> None:
        """GREEDY=: equal to the oracle's up to the first gap below the tolerance."""
        for prompt in PROMPTS:
            self.bench.check_greedy(prompt, self.bench.steps.alone(prompt, 12).output)
