"""One request: its tokens and scores, whatever its length and however it is cut into chunks."""

from __future__ import annotations

from hardpoint.capabilities import Capability
from hardpoint.messages import ModelRunnerOutput
from hardpoint.model_runner import ModelRunner

from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.generation import SCORED
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.suite import needs


class ForwardTests(ModelRunnerPart):
    """Against the oracle, alone."""

    def test_greedy_ids_are_the_oracles(self) -> None:
        """Equal up to the first place where the two best are closer than the tolerance."""
        compared = sum(
            self.bench.check_greedy(self.bench.steps.alone(prompt, 10))
            for prompt in self.bench.prompts(4)
        )
        expect(
            compared >= 10, "the model under test computes what the oracle computes",
            seen=f"only {compared} of 40 tokens could be compared: the rest are closer than the "
            f"tolerance {self.bench.tolerance:g}",
            where=ModelRunner.execute_model, do="Lower the probe's logit_tolerance.",
        )  # fmt: skip

    def test_prompts_that_end_about_the_end_of_a_block(self) -> None:
        """Lengths just below, at and above one block and two, and a single token."""
        size = self.bench.steps.block_size
        for length in sorted({1, size - 1, size, size + 1, 2 * size} - {0}):
            prompt = [(7 * place + length) % 90 + 2 for place in range(length)]
            self.bench.check_greedy(self.bench.steps.alone(prompt, 3), f"prompt of {length} tokens")

    def test_an_answer_over_many_blocks(self) -> None:
        """Until the longest request that the configuration allows."""
        longest = self.bench.executor.config.model.max_model_len or 64
        request = self.bench.steps.alone((5, 9, 3), longest - 3)
        self.bench.check_greedy(request, "an answer up to max_model_len")

    @needs(Capability.LOGPROBS)
    def test_scores_are_the_oracles_at_every_position(self) -> None:
        """All log-probabilities of all tokens, in the prompt's first token's place and later."""
        for prompt in self.bench.prompts(3, seed=5):
            self.bench.check_scores(self.bench.steps.alone(prompt, 8, SCORED))

    @needs(Capability.CHUNKED_PREFILL)
    def test_a_prompt_in_chunks_is_the_prompt(self) -> None:
        """Chunks of the smallest size, and of sizes that fit no block."""
        multiple = self.bench.steps.limits.chunk_multiple
        for chunk in sorted({multiple, 3 * multiple}):
            for length in (chunk + 1, 3 * chunk + 2):
                prompt = [(11 * place + chunk) % 90 + 2 for place in range(min(length, 60))]
                request = self.bench.steps.add(prompt)
                self.bench.steps.run(4, chunk=chunk)
                self.bench.check_greedy(request, f"prompt of {len(prompt)} in chunks of {chunk}")
                self.bench.steps.finish(request)

    @needs(Capability.CHUNKED_PREFILL)
    def test_an_unfinished_prompt_is_not_sampled(self) -> None:
        """Its row is empty."""
        multiple = self.bench.steps.limits.chunk_multiple
        request = self.bench.steps.add([3 + place % 50 for place in range(2 * multiple + 1)])
        output = self.bench.steps.step({request.req_id: multiple})
        expect_equal(
            tuple(map(tuple, output.tokens)), ((),),
            "a request whose prompt is not finished is not sampled: its row is empty",
            where=ModelRunnerOutput, do="Sample only rows that computed their last known token.",
        )  # fmt: skip

    def test_a_step_of_nothing_is_an_empty_output(self) -> None:
        """With total_tokens 0 there is nothing to run, and the output says which step it was."""
        output = self.bench.steps.step({})
        expect(
            not output.req_ids and not output.tokens,
            "a step without tokens gives an output without requests", seen=output,
            where=ModelRunner.execute_model, do="Forget the finished and return at once.",
        )  # fmt: skip

    def test_the_output_names_the_scheduled_requests_each_once(self) -> None:
        """Row M: ``req_ids`` is the batch order of this result."""
        requests = [self.bench.steps.add(p) for p in self.bench.prompts(self.bench.most_seqs)]
        seen: set[str] = set()
        for _ in range(self.bench.most_seqs):
            counts = self.bench.steps.counts()
            output = self.bench.steps.step(counts)
            expect_equal(
                sorted(output.req_ids), sorted(counts),
                "the output has the scheduled requests, each once",
                where=ModelRunnerOutput, do="Drop padding rows; keep one row for each request.",
            )  # fmt: skip
            seen |= set(output.req_ids)
        expect_equal(
            seen, {request.req_id for request in requests}, "every request gets its turn",
            where=ModelRunnerOutput, do="Return a row for each scheduled request.",
        )  # fmt: skip
