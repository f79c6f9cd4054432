"""What the scheduler costs a step: planning it and taking in its result, with no model at all.

    python benchmarks/scheduler.py [--running 1 16 64 256] [--waiting 0 10000] [--steps 300]
                                   [--json]

Every running request generates one token a step after 1,000 tokens of context, in blocks of 16, and
none ends; beside them ``--waiting`` requests wait for a seat. The cases take turns. The figures are
milliseconds of `schedule` and `commit` together: the median, and the 99th of a hundred.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from hardpoint.messages import ModelRunnerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.request import EngineRequest
from hardpoint_engine.scheduling.block_pool import BlockPool
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.scheduler import Scheduler
from hardpoint_engine.scheduling.step_draft import StepLimits
from hardpoint_engine.scheduling.stopping import StopRule

CONTEXT, BLOCK_SIZE, TURN = 1000, 16, 25
SAMPLING = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


class Case:
    """A scheduler at work. ``running`` requests run, ``waiting`` wait."""

    def __init__(self, running: int, waiting: int, steps: int) -> None:
        self.running = running
        self.waiting = waiting
        self.seconds: list[float] = []
        blocks_each = (CONTEXT + steps + TURN) // BLOCK_SIZE + 2
        self.scheduler = Scheduler(
            StepLimits(max_num_seqs=running, max_num_batched_tokens=running * CONTEXT),
            KVBlocks(BlockPool(running * blocks_each + 1), BLOCK_SIZE),
            clock=time.monotonic,
        )
        self.add(range(running))
        self.step()  # the prompts
        self.add(range(running, running + waiting))

    def add(self, numbers: range) -> None:
        rule = StopRule.of(SAMPLING, CONTEXT, (), 1 << 20)
        for number in numbers:
            prompt = [number % 30_000, *range(CONTEXT - 1)]
            source = EngineRequest(
                req_id=str(number), prompt=prompt, sampling=SAMPLING, arrival=0.0
            )
            self.scheduler.roster.add(source, rule)

    def step(self) -> float:
        """Return the seconds that the scheduler took; see that all ran and none ended."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter() - begin
        if plan is None or len(plan.num_tokens) != self.running:
            raise SystemExit(f"not all {self.running} requests are in the step: {plan}")
        ids = tuple(plan.num_tokens)
        output = ModelRunnerOutput(
            step_id=plan.step_id, req_ids=ids, tokens=tuple((7,) for _ in ids)
        )
        begin = time.perf_counter()
        results = self.scheduler.commit(plan, output)
        taken_in = time.perf_counter() - begin
        if len(results) != self.running or any(each.finish_reason for each in results):
            raise SystemExit("a request ended, or had no token")
        return planned + taken_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [
        Case(running, waiting, options.steps)
        for running in options.running
        for waiting in options.waiting
    ]
    while len(cases[0].seconds) < options.steps:
        for case in cases:
            case.seconds += [case.step() for _ in range(TURN)]
    rows = [
        {
            "running": case.running,
            "waiting": case.waiting,
            "median_ms": round(statistics.median(case.seconds) * 1e3, 4),
            "p99_ms": round(statistics.quantiles(case.seconds, n=100)[98] * 1e3, 4),
            "us_per_request": round(statistics.median(case.seconds) * 1e6 / case.running, 2),
        }
        for case in cases
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(
            "{running:5} running {waiting:6} waiting: median {median_ms:8.4f} ms   p99 "
            "{p99_ms:8.4f} ms   {us_per_request:6.2f} us for each running one".format(**row)
        )


if __name__ == "__main__":
    main()
