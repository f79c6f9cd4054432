"""Several requests at once: each answer is its own, whoever else is in the batch."""

from __future__ import annotations

import numpy as np
from hardpoint.capabilities import Capability
from hardpoint.errors import ConfigError
from hardpoint.model_runner import ModelRunner
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect
from hardpoint_conformance.generation import SCORED, Bench, scored_if
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.steps import Request
from hardpoint_conformance.suite import needs, not_applicable, own_workers


class BatchTests(ModelRunnerPart):
    """INV: exact only where batch invariance is declared, else within the tolerance."""

    def _batch(self, prompts: list[tuple[int, ...]], length: int, what: str) -> list[Request]:
        bench = self.bench
        sampling = scored_if(self.supports(Capability.LOGPROBS))
        requests = [bench.steps.add(prompt, sampling) for prompt in prompts]
        bench.steps.run(length)
        for request in requests:
            bench.check_greedy(request, what)
            if request.logprobs:
                bench.check_scores(request, what)
        return requests

    def test_a_full_batch_is_its_requests(self) -> None:
        """As many as a step may hold, of different lengths."""
        self._batch(self.bench.prompts(self.bench.most_seqs, seed=1), 8, "in a full batch")

    def test_the_order_of_a_batch_does_not_matter(self) -> None:
        """The same requests, the other way round."""
        prompts = self.bench.prompts(self.bench.most_seqs, seed=1)
        self._batch(prompts[::-1], 8, "in a batch in the reverse order")

    def test_every_size_of_a_batch(self) -> None:
        """From one request to as many as a step may hold: padded or not, each is its own."""
        for count in range(1, self.bench.most_seqs + 1):
            prompts = self.bench.prompts(count, seed=count)
            self.bench.steps.finish(*self._batch(prompts, 4, f"in a batch of {count}"))

    def test_padding_is_inert(self) -> None:
        """A request that waits while padded batches run finds its cache as it left it."""
        bench = self.bench
        idle = bench.steps.add((8, 30, 31, 32, 9), scored_if(self.supports(Capability.LOGPROBS)))
        bench.steps.run(3)
        for count in range(1, bench.most_seqs):
            others = [bench.steps.add(prompt) for prompt in bench.prompts(count, seed=count)]
            del bench.steps.requests[idle.req_id]
            bench.steps.run(3)
            bench.steps.finish(*others)
            bench.steps.requests[idle.req_id] = idle
        bench.steps.run(8)
        bench.check_greedy(idle, "a request that waited while padded batches ran")
        if idle.logprobs:
            bench.check_scores(idle, "a request that waited while padded batches ran")

    def test_requests_that_grow_together_get_each_its_own_blocks(self) -> None:
        """In one step each needs a new block, twice."""
        bench = self.bench
        size = bench.steps.block_size
        count = min(3, bench.most_seqs)
        sampling = scored_if(self.supports(Capability.LOGPROBS))
        requests = [
            bench.steps.add([3 + (7 * place + 11 * number) % 80 for place in range(size)], sampling)
            for number in range(count)
        ]
        bench.steps.run(size + 3)
        for request in requests:
            bench.check_greedy(request, "requests whose block tables grow in the same step")
            if request.logprobs:
                bench.check_scores(request, "requests whose block tables grow in the same step")

    def test_requests_come_and_go(self) -> None:
        """A new one in the step after another ended takes nothing over from it."""
        bench = self.bench
        prompts = bench.prompts(3 * bench.most_seqs, seed=9, longest=14)
        running: list[Request] = []
        for turn, prompt in enumerate(prompts):
            if len(running) == bench.most_seqs:
                leaving = running.pop(turn % len(running))
                bench.check_greedy(leaving, "in a batch whose requests come and go")
                bench.steps.finish(leaving)
            running.append(bench.steps.add(prompt))
            for _ in range(2):
                bench.steps.round()
        for request in running:
            bench.check_greedy(request, "in a batch whose requests come and go")

    def test_parameters_belong_to_their_row(self) -> None:
        """Greedy, drawn and edited rows in one batch."""
        bench = self.bench
        plain = bench.steps.add((5, 6, 7))
        if bench.most_seqs > 1:
            bench.steps.add((5, 6, 7), SamplingParams(temperature=1.5, seed=3, max_tokens=None))
        if bench.most_seqs > 2:
            first = bench.logits((5, 6, 7))[-1].argmax()
            barred = SamplingParams(
                temperature=0, seed=1, max_tokens=None, logit_bias={int(first): -100.0}
            )
            edited = bench.steps.add((5, 6, 7), barred)
            bench.steps.run(6)
            bench.check_greedy(edited, "a row with logit_bias beside others")
        bench.steps.run(6)
        bench.check_greedy(plain, "a greedy row beside drawn and edited ones")

    @own_workers
    @needs(Capability.BATCH_INVARIANCE)
    def test_scores_are_bitwise_equal_in_any_batch(self) -> None:
        """Alone, in a batch, in another order and place: the same bits, with ``batch_invariant``.
        A machine that cannot, where the platform can elsewhere, is not applicable.
        """
        bench = self._invariant()
        prompts = bench.prompts(bench.most_seqs, seed=2)
        alone = [bench.scores(each) for each in bench.run_alone(prompts, 6, SCORED)]
        for order in (prompts, prompts[::-1]):
            requests = {prompt: bench.steps.add(prompt, SCORED) for prompt in order}
            bench.steps.run(6)
            for prompt, wanted in zip(prompts, alone, strict=True):
                seen = bench.scores(requests[prompt])
                expect(
                    np.array_equal(seen, wanted),
                    "with batch_invariant, logits are bitwise equal whatever else is in the batch",
                    seen=f"log-probabilities differ by up to {np.abs(seen - wanted).max():.3g} in "
                    f"a batch of {len(order)}",
                    where=ModelRunner.execute_model,
                    do="Declare BATCH_INVARIANCE as NOT_YET, or use kernels whose reduction order "
                    "does not depend on the batch where config.model.batch_invariant is set.",
                )
            bench.steps.finish(*requests.values())

    def _invariant(self) -> Bench:
        """Return workers that were asked for it."""
        try:
            return self.other(batch_invariant=True)
        except ConfigError as error:
            told = any(each.key == "batch_invariant" for each in error.problems)
            if not told or not self.supports(Capability.BATCH_INVARIANCE):
                raise
            not_applicable(f"not on this machine, or with these settings: {error}")
