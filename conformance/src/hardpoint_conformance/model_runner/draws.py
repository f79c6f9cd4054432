"""Choosing tokens: what each parameter does, and what a seed is good for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.messages import GrammarOutput, StepTicket
from hardpoint.model_runner import ModelRunner
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.generation import scored_if
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.sampling_rules import chances
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.suite import needs

PROMPT = (5, 9, 3, 5, 9, 3, 14)
DRAWN = SamplingParams(temperature=1.0, seed=11, max_tokens=None)
PARAMETERS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "min_tokens", "stop_token_ids", "bad_word_ids",
)  # fmt: skip
CUTS = ("temperature", "top_k", "top_p", "min_p", "top_k, then top_p")
DRAWS = 96
"""Draws by which a distribution is judged."""


class DrawTests(ModelRunnerPart):
    """Against the oracle's logits and the rules of SamplingParams in numpy."""

    @pytest.mark.parametrize("parameter", PARAMETERS)
    def test_a_parameter_changes_the_choice_as_the_rules_say(self, parameter: str) -> None:
        """Greedy under one parameter; alone, and again beside a plain request."""
        bench = self.bench
        params = self._parameters(parameter)
        bench.require_accepted(params)
        alone = bench.steps.alone(PROMPT, 8, params)
        bench.check_greedy(alone, f"a request with {parameter}")
        request = bench.steps.add(PROMPT, params)
        if bench.most_seqs > 1:
            bench.steps.add((7, 8))
        bench.steps.run(8)
        bench.check_greedy(request, f"a request with {parameter} beside another")

    def test_penalties_count_what_was_chosen_before_a_request_was_computed_anew(self) -> None:
        """After a preemption, and for workers that never saw it."""
        bench = self.bench
        params = self._parameters("frequency_penalty")
        bench.require_accepted(params)
        request = bench.steps.add(PROMPT, params)
        bench.steps.run(5)
        again = bench.steps.recompute(request)
        bench.steps.preempt(request)
        bench.steps.run(10)
        bench.check_greedy(request, "a request with frequency_penalty, after a preemption")
        bench.check_greedy(again, "a request with frequency_penalty, recomputed from its tokens")

    @pytest.mark.parametrize("parameter", CUTS)
    def test_draws_follow_their_distribution(self, parameter: str) -> None:
        """Frequencies over many seeds, and nothing outside of what may be drawn."""
        bench = self.bench
        params = {
            "temperature": evolve(DRAWN, temperature=0.5),
            "top_k": evolve(DRAWN, temperature=1.5, top_k=3),
            "top_p": evolve(DRAWN, temperature=1.5, top_p=0.6),
            "min_p": evolve(DRAWN, temperature=1.5, min_p=0.3),
            "top_k, then top_p": evolve(DRAWN, temperature=1.5, top_k=4, top_p=0.6),
        }[parameter]
        bench.require_accepted(params)
        scores = bench.logits(PROMPT)[-1] / params.effective_temperature
        wanted = chances(bench.logits(PROMPT)[-1], params)
        counts: Counter[int] = Counter()
        while counts.total() < DRAWS:
            requests = [
                bench.steps.add(PROMPT, params.with_seed(1000 + counts.total() + place))
                for place in range(bench.most_seqs)
            ]
            bench.steps.run(1)
            counts.update(request.output[0] for request in requests)
            bench.steps.finish(*requests)
        self._check_frequencies(counts, wanted, parameter)
        if parameter == "temperature" or not self._near_the_cut(wanted):
            self._check_mean(counts, wanted, scores, parameter)

    def test_a_seed_gives_the_same_answer_whoever_is_beside(self) -> None:
        """A draw depends on (seed, position) and the logits, on nothing else."""
        bench = self.bench
        alone = bench.steps.alone(PROMPT, 8, DRAWN).output
        others = [
            bench.steps.add(prompt, DRAWN.with_seed(5 + place))
            for place, prompt in enumerate(bench.prompts(bench.most_seqs - 1, seed=3))
        ]
        request = bench.steps.add(PROMPT, DRAWN)  # in another row than alone
        bench.steps.run(8)
        self._expect_same(request.output, alone, "in a batch")
        bench.steps.finish(*others)
        bench.steps.finish(request)
        self._expect_same(bench.steps.alone(PROMPT, 8, DRAWN).output, alone, "again, later")

    def test_a_seed_gives_the_same_answer_after_preemption(self) -> None:
        """Recomputing a request draws nothing anew."""
        bench = self.bench
        alone = bench.steps.alone(PROMPT, 8, DRAWN).output
        request = bench.steps.add(PROMPT, DRAWN)
        bench.steps.run(4)
        bench.steps.preempt(request)
        bench.steps.run(8)
        self._expect_same(request.output, alone, "after a preemption")

    def test_other_seeds_give_other_answers(self) -> None:
        """Rows of a batch share no generator."""
        bench = self.bench
        wild = evolve(DRAWN, temperature=2.0)
        requests = [bench.steps.add(PROMPT, wild.with_seed(n)) for n in range(bench.most_seqs)]
        bench.steps.run(8)
        answers = {tuple(request.output) for request in requests}
        expect_equal(
            len(answers), len(requests), "each request draws by its own seed",
            where=SamplingParams, do="Key every draw by (seed, position) of its own row.",
        )  # fmt: skip

    def test_each_position_draws_anew(self) -> None:
        """An answer at a high temperature does not repeat one number."""
        bench = self.bench
        flat = SamplingParams(
            temperature=2.0, seed=3, max_tokens=None,
            logit_bias=dict.fromkeys(range(40, 60), 100.0),
        )  # fmt: skip
        output = bench.steps.alone(PROMPT, 24, flat).output
        ((token, count),) = Counter(output).most_common(1)
        expect(
            count <= 12, "a draw is a function of seed and position",
            seen=f"of 24 draws among twenty tokens {count} gave {token}: {output}",
            where=SamplingParams, do="Let the position into the key of each draw.",
        )  # fmt: skip

    # Masks.

    @needs(Capability.GRAMMAR)
    def test_a_deferred_step_chooses_what_an_immediate_one_does(self) -> None:
        """A ticket, then the output of the step it names."""
        bench = self.bench
        wanted = bench.steps.alone(PROMPT, 1).output
        request = bench.steps.add(PROMPT, scored_if(self.supports(Capability.LOGPROBS)))
        plan = bench.steps.plan({request.req_id: len(PROMPT)}, defer_sampling=True)
        ticket = bench.execute(plan)
        expect_equal(
            type(ticket), StepTicket, "defer_sampling gives a StepTicket",
            where=ModelRunner.execute_model, do="Keep the logits and return a ticket.",
        )  # fmt: skip
        bench.steps.take(plan, bench.executor.sample_tokens(ticket))
        expect_equal(
            request.output, wanted, "sample_tokens finishes the step as execute_model would have",
            where=ModelRunner.sample_tokens, do="Sample the kept logits with the same code.",
        )  # fmt: skip
        if self.supports(Capability.LOGPROBS):
            bench.check_scores(request, "a request whose step was deferred")

    @needs(Capability.GRAMMAR)
    def test_a_mask_binds_its_request_alone(self) -> None:
        """Bit = 1 allows; rows without a mask are as they were."""
        bench = self.bench
        requests = [bench.steps.add(PROMPT) for _ in range(min(2, bench.most_seqs))]
        bench.steps.run(1)
        *others, bound = requests  # not in the first row, where there are two
        plain = int(bench.logits(bound.tokens)[-1].argmax())
        allowed = (plain + 17) % bench.vocab_size
        words = bytearray(4 * -(-bench.vocab_size // 32))
        words[allowed // 8] |= 1 << allowed % 8
        plan = bench.steps.plan({r.req_id: 1 for r in requests}, defer_sampling=True)
        grammar = GrammarOutput(req_ids=(bound.req_id,), masks=((bytes(words),),))
        ticket = bench.execute(plan)
        bench.steps.take(plan, bench.executor.sample_tokens(ticket, grammar))
        expect_equal(
            bound.output[-1], allowed, "a mask with one bit leaves one token",
            where=GrammarOutput, do="Bits are little-endian in 32-bit words, 1 allows.",
        )  # fmt: skip
        for request in others:
            bench.check_greedy(request, "a request without a mask beside one with")

    # Within.

    def _parameters(self, parameter: str) -> SamplingParams:
        rows = self.bench.logits(PROMPT)[-1]
        best, second = (int(token) for token in np.argsort(-rows)[:2])
        following = int(self.bench.logits([*PROMPT, best])[-1].argmax())
        # Among few tokens an answer repeats itself, so that each penalty has its effect.
        few = dict.fromkeys((5, 6, 7), 100.0)
        values: dict[str, dict[str, Any]] = {
            "repetition_penalty": {"repetition_penalty": 1.6, "logit_bias": few},
            "presence_penalty": {"presence_penalty": 2.0, "logit_bias": few},
            "frequency_penalty": {"frequency_penalty": 2.0, "logit_bias": few},
            "logit_bias": {"logit_bias": {best: -100.0, second: 3.0}},
            "allowed_token_ids": {"allowed_token_ids": tuple(range(30, 45))},
            "min_tokens": {"min_tokens": 4, "logit_bias": {1: 100.0}},
            "stop_token_ids": {"min_tokens": 4, "stop_token_ids": (best, second)},
            "bad_word_ids": {"bad_word_ids": ((best, following), (second,))},
        }
        params = evolve(GREEDY, **values[parameter])
        if self.bench.refused(params) and parameter.endswith("penalty"):
            params = evolve(params, logit_bias=None)
        return params

    def _check_frequencies(self, counts: Counter[int], wanted: Any, parameter: str) -> None:
        total = counts.total()
        barred = {token: n for token, n in counts.items() if wanted[token] == 0}
        near = self._near_the_cut(wanted)
        expect(
            not barred or near,
            f"with {parameter} no other token is drawn than those it leaves",
            seen=f"drawn though cut off: {barred} of {total}", where=SamplingParams,
            do="Cut in the order temperature, min-p, top-k, top-p.",
        )  # fmt: skip
        shares = np.array([counts[token] / total for token in range(len(wanted))])
        bound = 4.5 * np.sqrt(np.maximum(wanted * (1 - wanted), 0.01) / total) + 0.02
        worst = int((np.abs(shares - wanted) - bound).argmax())
        expect(
            abs(shares[worst] - wanted[worst]) <= bound[worst],
            "tokens are drawn as often as their probability says",
            seen=f"{parameter}: token {worst} in {shares[worst]:.0%} of {total} draws, its "
            f"probability is {wanted[worst]:.0%}",
            where=SamplingParams,
            do="Draw from softmax(logits / temperature) of what is left, by a number that is "
            "uniform over seeds.",
        )  # fmt: skip

    def _check_mean(self, counts: Counter[int], wanted: Any, scores: Any, parameter: str) -> None:
        """Compare the mean of the scaled logits over all draws, which a wrong temperature moves
        long before it can be seen of any single token.
        """
        total = counts.total()
        expected = float(wanted @ scores)
        spread = float(np.sqrt(wanted @ (scores - expected) ** 2))
        mean = sum(count * scores[token] for token, count in counts.items()) / total
        # Logits may be off by the tolerance, and no temperature here more than doubles that.
        slack = 2 * self.bench.tolerance * (1 + spread)
        bound = 4.5 * max(spread, 0.1) / np.sqrt(total) + slack
        expect(
            abs(mean - expected) <= bound,
            "tokens are drawn from the softmax of logits / temperature",
            seen=f"{parameter}: the logits of {total} drawn tokens, divided by the temperature, "
            f"are {mean:.3g} in the mean; {expected:.3g} is to be expected, give or take "
            f"{bound:.2g}",
            where=SamplingParams,
            do="Divide by the temperature once, before the cuts, and draw from what they leave.",
        )  # fmt: skip

    def _near_the_cut(self, wanted: Any) -> bool:
        """Whether the oracle cannot tell which tokens are cut: with 16 bits, or an equal score."""
        kept = wanted[wanted > 0]
        return self.bench.tolerance > 0.01 or len(kept) == 0

    def _expect_same(self, seen: list[int], alone: list[int], when: str) -> None:
        if self.bench.tolerance > 0.01:  # a 16-bit batch may move a draw that was close
            seen, alone = seen[:1], alone[:1]
        expect_equal(
            seen, alone, f"with its seed a request draws the same {when}",
            where=SamplingParams, do="Key every draw by (seed, position) of its own row.",
        )  # fmt: skip
