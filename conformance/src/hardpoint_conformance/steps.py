"""What a scheduler is to a group of workers, in few lines: plans steps and knows the requests.

It obeys the platform's limits, gives out blocks in another order each time (so that no table is a
range by luck), and can do what schedulers do to a request: chunk, preempt, resume, share.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field
from hardpoint.executor import Executor
from hardpoint.messages import (
    CachedRequestData,
    Logprobs,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from hardpoint.records import Limits
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect

GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=None)


@define(eq=False)
class Request:
    """One request as the driver knows it."""

    req_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: list[int]
    fields: Mapping[str, Any] = field(factory=dict)
    blocks: list[int] = field(factory=list)
    computed: int = 0
    known: bool = False
    parked: bool = False
    told: int = 0
    logprobs: list[Logprobs] = field(factory=list)
    prompt_logprobs: Logprobs | None = None

    @property
    def output(self) -> list[int]:
        """The ids chosen so far."""
        return self.tokens[len(self.prompt) :]

    def untold(self) -> tuple[int, ...]:
        """Return the chosen ids that no plan has brought, once: for stages that do not sample."""
        fresh = tuple(self.output[self.told :])
        self.told = len(self.output)
        return fresh

    @property
    def decoding(self) -> bool:
        """Whether only its last token is left to compute."""
        return self.left == 1 and self.known and bool(self.output)

    @property
    def left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed


class Steps:
    """Drives one executor that can execute. ``output`` is the last step's."""

    def __init__(self, executor: Executor, *, seed: int = 0) -> None:
        self.executor = executor
        self.limits: Limits = executor.platform.limits(executor.config)
        self.block_size = executor.config.cache.block_size or self.limits.block_sizes[0]
        self.requests: dict[str, Request] = {}
        self.output: ModelRunnerOutput | None = None
        self._rng = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._free: list[int] | None = None
        self._step_id = 0
        self._finished: set[str] = set()
        self._parked: set[str] = set()
        self._names = 0

    # Requests.

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        computed: int = 0,
        blocks: Sequence[int] = (),
        **fields: Any,
    ) -> Request:
        """Add a request; nothing is sent yet. ``blocks`` hold its first ``computed`` positions."""
        self._names += 1
        req_id = f"r{self._names}"
        seeded = sampling if sampling.seed is not None else evolve(sampling, seed=1)
        request = Request(
            req_id, tuple(prompt), seeded, list(prompt), fields, list(blocks), computed
        )
        self.requests[req_id] = request
        return request

    def finish(self, *requests: Request) -> None:
        """Forget requests; workers are told with the next step."""
        for request in requests:
            self._give_back(request.blocks)
            if request.known:
                self._finished.add(request.req_id)
            self.requests.pop(request.req_id, None)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks; others may get them at once."""
        self._give_back(request.blocks)
        request.blocks, request.computed, request.parked = [], 0, True
        self._parked.add(request.req_id)

    def recompute(self, first: Request) -> Request:
        """Send what a request is so far as one that is new to the workers, and compute it:
        ``prefill_tokens``.
        """
        again = self.add(first.prompt, first.sampling)
        again.tokens += first.output
        plan = self.plan({again.req_id: len(again.tokens)})
        new = evolve(plan.new[0], prefill_tokens=tuple(again.tokens))
        plan = evolve(plan, new=(new,))
        self.take(plan, self.executor.execute_model(plan))
        return again

    # Steps.

    def step(self, counts: Mapping[str, int], **fields: Any) -> ModelRunnerOutput:
        """Run one step of ``counts`` (request -> tokens) and take what it chose."""
        plan = self.plan(counts, **fields)
        output: ModelRunnerOutput = self.executor.execute_model(plan)
        self.take(plan, output)
        return output

    def plan(self, counts: Mapping[str, int], **fields: Any) -> SchedulerOutput:
        """Return the plan of a step; the driver's side is as if it had been sent."""
        new, rows, resumed = [], [], set()
        for req_id, count in counts.items():
            request = self.requests[req_id]
            fresh = tuple(self._grow(request, request.computed + count))
            if not request.known:
                request.known = True
                new.append(self._new(request))
                continue
            if request.parked:
                request.parked = False
                resumed.add(req_id)
                fresh = tuple(request.blocks)
            rows.append((request, (fresh,) if fresh else None))
        self._step_id += 1
        told = self.executor.parallel_config.pipeline_parallel_size > 1
        plan = SchedulerOutput(
            step_id=self._step_id,
            new=tuple(new),
            running=CachedRequestData(
                req_ids=tuple(request.req_id for request, _ in rows),
                new_blocks=tuple(blocks for _, blocks in rows),
                num_computed=tuple(request.computed for request, _ in rows),
                num_output=tuple(len(request.output) for request, _ in rows),
                resumed=frozenset(resumed),
                new_tokens=tuple(request.untold() for request, _ in rows) if told else (),
            ),
            num_tokens=dict(counts),
            total_tokens=sum(counts.values()),
            finished=frozenset(self._finished),
            preempted=frozenset(self._parked - self._finished),
            **fields,
        )
        self._finished, self._parked = set(), set()
        return plan

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Note a step's result."""
        self.output = output
        chosen = dict(zip(output.req_ids, output.tokens, strict=True))
        for req_id, count in plan.num_tokens.items():
            request = self.requests.get(req_id)
            if request is None:
                continue
            tokens = chosen.get(req_id, ())
            drafts = len(plan.drafts.get(req_id, ()))
            request.computed += count - drafts + max(0, len(tokens) - 1)
            request.tokens += tokens
            if req_id in output.logprobs:
                request.logprobs.append(output.logprobs[req_id])
            if req_id in output.prompt_logprobs:
                request.prompt_logprobs = output.prompt_logprobs[req_id]

    def round(self, chunk: int | None = None) -> ModelRunnerOutput:
        """Advance every request: in one step where the limits allow it, else prompts first."""
        return self.step(self.counts(chunk))

    def counts(self, chunk: int | None = None) -> dict[str, int]:
        """Return how many tokens of which request a scheduler would compute next."""
        waiting = [r for r in self.requests.values() if not r.decoding]
        decoding = [r for r in self.requests.values() if r.decoding]
        if not self.limits.mixed_batches and waiting:
            decoding = []
        if (limit := self.limits.max_prefills_per_step) is not None:
            waiting = waiting[:limit]
        most_seqs = self.executor.config.scheduler.max_num_seqs or len(self.requests)
        counts = {r.req_id: 1 for r in decoding[:most_seqs]}
        room = (self.executor.config.scheduler.max_num_batched_tokens or 64) - len(counts)
        for request in waiting[: most_seqs - len(counts)]:
            count = min(request.left, chunk or request.left, room)
            if count < request.left:
                count -= count % self.limits.chunk_multiple
            if count > 0:
                counts[request.req_id] = count
                room -= count
        if self.requests and not counts:
            raise ValueError(f"no step is possible: a chunk of {chunk} within {self.limits}")
        return counts

    def run(self, num_output: int, *, chunk: int | None = None) -> list[list[int]]:
        """Advance until every request has ``num_output`` tokens; return them, in order."""
        requests = list(self.requests.values())
        while busy := [r for r in requests if len(r.output) < num_output]:
            self._check_sampled(busy)
            self.requests = {request.req_id: request for request in busy}
            self.round(chunk)
        self.requests = {request.req_id: request for request in requests}
        return [request.output[:num_output] for request in requests]

    @staticmethod
    def _check_sampled(requests: Sequence[Request]) -> None:
        silent = next((each for each in requests if not each.left), None)
        expect(
            silent is None, "the step that computes a request's last known token chooses the next",
            seen=f"request {getattr(silent, 'req_id', '')}: nothing chosen",
            where=ModelRunnerOutput,
            do="Sample where the plan reaches the end of what is known: the prompt and what was "
            "chosen since, or prefill_tokens.",
        )  # fmt: skip

    def alone(
        self, prompt: Sequence[int], num_output: int, sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> Request:  # fmt: skip
        """Run one request by itself and finish it."""
        others, self.requests = self.requests, {}
        request = self.add(prompt, sampling, **fields)
        self.run(num_output)
        self.finish(request)
        self.requests = others
        return request

    def clear(self) -> None:
        """Finish every request and tell the workers."""
        self.finish(*list(self.requests.values()))
        if self._finished:
            self.step({})

    # Blocks.

    @property
    def free(self) -> list[int]:
        """Blocks that no request holds."""
        if self._free is None:
            from hardpoint_conformance.subject import BLOCKS

            reserved = self.limits.reserved_blocks
            self._free = list(range(reserved, reserved + BLOCKS))
        return self._free

    def _grow(self, request: Request, end: int) -> list[int]:
        needed = -(-end // self.block_size) - len(request.blocks)
        self._rng.shuffle(self.free)
        fresh = [self.free.pop() for _ in range(max(0, needed))]
        request.blocks += fresh
        return fresh

    def _give_back(self, blocks: Sequence[int]) -> None:
        self.free.extend(block for block in blocks if block not in self.free)

    def _new(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.req_id,
            prompt=request.prompt,
            sampling=request.sampling,
            block_ids=(tuple(request.blocks),),
            num_computed=request.computed,
            **request.fields,
        )
