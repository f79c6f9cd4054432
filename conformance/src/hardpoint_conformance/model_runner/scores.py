"""Log-probabilities, of answers and of prompts, and vectors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.messages import Logprobs, ModelRunnerOutput
from hardpoint.pooling_params import POOLINGS, PoolingParams

from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.suite import needs, not_applicable

PROMPT = (5, 9, 3, 77, 20, 21)


class ScoreTests(ModelRunnerPart):
    """The layout of a row, and whose it is."""

    @needs(Capability.LOGPROBS)
    def test_a_row_of_scores_is_laid_out_as_written(self) -> None:
        """The chosen token, then the best, best first; ranks."""
        bench = self.bench
        drawn = evolve(GREEDY, temperature=2.0, seed=5, logprobs=4)
        for sampling in (evolve(GREEDY, logprobs=4), drawn):
            request = bench.steps.alone(PROMPT, 5, sampling)
            for index, row in enumerate(request.logprobs):
                self._check_row(row, request.output[index], 4)

    @needs(Capability.LOGPROBS)
    def test_listed_tokens_are_scored_too(self) -> None:
        """``logprob_token_ids`` follow the best ones, each once."""
        listed = (40, 41, 42)
        sampling = evolve(GREEDY, logprobs=2, logprob_token_ids=listed)
        row = self.bench.steps.alone(PROMPT, 1, sampling).logprobs[0]
        best = row.ids[0][1 : 1 + row.num_best]
        rest = row.ids[0][1 + row.num_best :]
        expect_equal(
            sorted(rest), sorted(set(listed) - set(best)),
            "the columns after the best are the listed ids that are not among them",
            where=Logprobs, do="Append logprob_token_ids, best first, without repeats.",
        )  # fmt: skip

    @needs(Capability.LOGPROBS)
    def test_only_those_who_ask_get_scores(self) -> None:
        """Beside each other, each as many as it asked for."""
        bench = self.bench
        asks = bench.steps.add(PROMPT, evolve(GREEDY, logprobs=1))
        asking = [asks]
        if bench.most_seqs > 1:
            bench.steps.add((6, 7))
        if bench.most_seqs > 2:
            asking.append(bench.steps.add(PROMPT, evolve(GREEDY, logprobs=3)))
        bench.steps.run(1)
        output = bench.steps.round()
        expect_equal(
            set(output.logprobs), {request.req_id for request in asking},
            "only requests that asked have log-probabilities",
            where=ModelRunnerOutput, do="Return rows for those whose SamplingParams ask.",
        )  # fmt: skip
        for request, count in zip(asking, (1, 3), strict=False):
            self._check_row(request.logprobs[-1], request.output[-1], count)
        bench.check_greedy(asks, "a request with logprobs beside one without")

    @needs(Capability.PROMPT_LOGPROBS)
    def test_a_prompt_is_scored_token_by_token(self) -> None:
        """Row i scores prompt token i + 1, in the step that finishes the prompt."""
        bench = self.bench
        sampling = evolve(GREEDY, prompt_logprobs=-1)
        multiple = bench.steps.limits.chunk_multiple
        for chunk in (None, multiple):
            prompt = [3 + 7 * place % 80 for place in range(2 * multiple + 4)]
            request = bench.steps.add(prompt, sampling)
            bench.steps.run(1, chunk=chunk)
            scored = request.prompt_logprobs
            if scored is None or len(scored.ids) != len(prompt) - 1:
                expect(
                    False, "a prompt of n tokens has n - 1 rows of log-probabilities",
                    seen=f"{0 if scored is None else len(scored.ids)} rows for {len(prompt)} "
                    f"tokens (chunk {chunk})",
                    where=ModelRunnerOutput, do="Collect them over the chunks of the prompt.",
                )  # fmt: skip
                continue
            rows = np.stack([bench.score_row(scored, index) for index in range(len(scored.ids))])
            what = f"prompt log-probabilities, in chunks of {chunk}"
            bench.check_close(rows, bench.logprobs(prompt)[:-1], what)
            expect_equal(
                [row[0] for row in scored.ids], prompt[1:],
                "column 0 of row i is prompt token i + 1", where=ModelRunnerOutput,
                do="Score the token that follows, not the one at the position.",
            )  # fmt: skip
            bench.steps.finish(request)

    @needs(Capability.POOLING)
    def test_a_vector_is_the_prompts_own(self) -> None:
        """A request with ``pooling`` ends with a vector, the same alone and beside others."""
        bench = self.bench
        vectors = []
        for others in (0, min(2, bench.most_seqs - 1)):
            request = bench.steps.add(PROMPT, pooling=PoolingParams("last"))
            for number in range(others):
                bench.steps.add((9 + number, 8))
            while request.left:
                output = bench.steps.round()
            vectors.append(np.asarray(output.pooled.get(request.req_id, ())))
            expect(
                len(vectors[-1]) > 0 and not request.output,
                "a request with pooling has a vector and no tokens",
                seen=f"{len(vectors[-1])} numbers, tokens {request.output}",
                where=ModelRunnerOutput, do="Put the vector into pooled, and an empty row.",
            )  # fmt: skip
            bench.steps.clear()
        off = float(np.abs(vectors[0] - vectors[1]).max())
        expect(
            off <= max(bench.tolerance, 1e-6), "a vector does not depend on the batch",
            seen=f"it differs by up to {off:.3g}", where=ModelRunnerOutput,
            do="Pool the states of the request's own positions.",
        )  # fmt: skip
        request = bench.steps.add(PROMPT[::-1], pooling=PoolingParams("last"))
        while request.left:
            output = bench.steps.round()
        expect(
            tuple(output.pooled.get(request.req_id, ())) != tuple(vectors[0]),
            "another prompt has another vector", seen=f"{vectors[0][:4]} of both",
            where=ModelRunnerOutput, do="Pool what the model made of the prompt.",
        )  # fmt: skip

    @needs(Capability.POOLING)
    @pytest.mark.parametrize("pooling", POOLINGS)
    def test_a_vector_is_of_the_models_own_states(self, pooling: str) -> None:
        """As it is and normalised, in one piece and in chunks."""
        bench = self.bench
        multiple = bench.steps.limits.chunk_multiple
        prompt = [3 + 7 * place % 80 for place in range(2 * multiple + 4)]
        states = bench.oracle.states(prompt)
        if states is None:
            not_applicable("the platform's model is a rule of its own, without states")
        wanted = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
        chunks = (None, multiple) if self.supports(Capability.CHUNKED_PREFILL) else (None,)
        for chunk, normalize in itertools.product(chunks, (False, True)):
            request = bench.steps.add(prompt, pooling=PoolingParams(pooling, normalize))
            while request.left:
                output = bench.steps.round(chunk)
            seen = np.asarray(output.pooled.get(request.req_id, ()))
            right = wanted / np.linalg.norm(wanted) if normalize else wanted
            off = float(np.abs(seen - right).max()) if seen.shape == right.shape else np.inf
            expect(
                off <= bench.tolerance, "a vector is pooled from the final hidden states",
                seen=f"{pooling}, normalize={normalize}, in chunks of {chunk}: {len(seen)} "
                f"numbers, off by up to {off:.3g} (tolerance {bench.tolerance:g})",
                where=PoolingParams, do="Pool after the last norm, over all chunks of the prompt.",
            )  # fmt: skip
            bench.steps.finish(request)

    def _check_row(self, row: Logprobs, token: int, asked: int) -> None:
        ids, values = row.ids[0], row.values[0]
        ranks = row.ranks[0]
        rank = ranks if isinstance(ranks, int) else ranks[0]
        best = values[1 : 1 + asked]
        wanted_rank = 1 + sum(value > values[0] for value in best)
        expect(
            len(row.ids) == 1 and row.num_best == asked and ids[0] == token
            and list(best) == sorted(best, reverse=True)
            and (rank == wanted_rank if wanted_rank <= asked else rank > asked),
            "a row has the chosen token in column 0, then the best of the vocabulary, best first; "
            "ranks count the values that are at least the token's own",
            seen=f"token {token}: ids {ids}, values {[round(v, 3) for v in values]}, rank {rank}, "
            f"num_best {row.num_best} of {asked} asked for",
            where=Logprobs,
            do="Take log-softmax of the raw logits; look for rows that are shifted by one.",
        )  # fmt: skip
