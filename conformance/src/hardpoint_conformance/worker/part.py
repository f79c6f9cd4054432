"""What the parts of the Worker suite share."""

from __future__ import annotations

from typing import Any

from hardpoint.capabilities import YES, Capability
from hardpoint.executor import Executor

from hardpoint_conformance import in_worker
from hardpoint_conformance.generation import SCORED, Bench
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.suite import Suite

PROMPT = (5, 9, 3, 77, 20)


class WorkerPart(Suite):
    """Some of the suite's tests."""

    @property
    def bench(self) -> Bench:
        """A group of workers that can execute."""
        return Bench.of(self.subject)

    def scored(self) -> Any:
        """Return parameters that ask for log-probabilities where they can be had."""
        return SCORED if self.subject.support(Capability.LOGPROBS) is YES else GREEDY

    def held(self, group: Executor) -> int | None:
        """Return the bytes that the probe counts over all ranks; None where it counts none."""
        kind = type(self.subject.probe)
        held = group.collective_rpc(in_worker.held_bytes, args=(kind,))
        return None if None in held else sum(held)
