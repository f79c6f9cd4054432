"""One group of workers, its driver and its oracle: what the ModelRunner suite works with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from hardpoint.adapters import LoRARequest
from hardpoint.executor import Executor
from hardpoint.messages import Logprobs, SchedulerOutput
from hardpoint.model_runner import ModelRunner
from hardpoint.platform import RequestView
from hardpoint.records import Problem
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect, violated
from hardpoint_conformance.oracle import Oracle
from hardpoint_conformance.oracle_choice import oracle_for, tolerance_for
from hardpoint_conformance.sampling_rules import edited
from hardpoint_conformance.steps import GREEDY, Request, Steps
from hardpoint_conformance.subject import Subject
from hardpoint_conformance.suite import not_applicable

SCORED = SamplingParams(temperature=0, seed=1, max_tokens=None, logprobs=-1)
"""Greedy, with the log-probability of every token."""


class Bench:
    """Workers that can execute; made once for the tests of a suite, anew after one that failed."""

    def __init__(self, subject: Subject, executor: Executor) -> None:
        self.subject = subject
        self.executor = executor
        self.steps = Steps(executor)
        description = executor.config.description
        if description is None:
            raise TypeError("a group without a model's description")
        self.description = description
        self.vocab_size = description.vocab_size
        self.tolerance = tolerance_for(subject.probe, executor.config.model.dtype)

    @classmethod
    def of(cls, subject: Subject) -> Bench:
        """Return the shared bench of ``subject``, without requests."""
        bench = subject.shared
        if not isinstance(bench, cls):
            bench = subject.shared = cls(subject, subject.ready())
        bench.steps.clear()
        return bench

    @cached_property
    def oracle(self) -> Oracle:
        """What outputs are compared with; the weights are read when it is first asked."""
        oracle = oracle_for(self.subject.probe, self.description)
        self.subject.oracle = oracle.name
        return oracle

    @property
    def most_seqs(self) -> int:
        """Requests that a step may hold."""
        return self.executor.config.scheduler.max_num_seqs or 1

    def prompts(self, count: int, *, seed: int = 0, longest: int = 20) -> list[tuple[int, ...]]:
        """Return ``count`` prompts of different lengths."""
        rng = np.random.default_rng(seed)
        lengths = rng.permutation(np.linspace(2, longest, count).astype(int))
        return [tuple(rng.integers(2, self.vocab_size, length).tolist()) for length in lengths]

    def require_accepted(self, sampling: SamplingParams) -> None:
        """End the test where the platform says beforehand that it cannot serve ``sampling``."""
        problem = self.refused(sampling)
        if problem is not None:
            not_applicable(f"check_request refuses it: {problem}")

    def refused(self, sampling: SamplingParams) -> Problem | None:
        """Return what the platform says beforehand against ``sampling``."""
        view = RequestView(req_id="kit", num_prompt_tokens=4, sampling=sampling)
        return self.executor.platform.check_request(view)

    def oracle_tokens(self, request: Request, count: int) -> tuple[int, ...]:
        """Return the ``count`` greedy tokens that the oracle has after what a request has."""
        tokens = list(request.tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(tokens) - count :])

    def follow(self, path: str) -> None:
        """Compare with the model in ``path`` from now on."""
        description = evolve(self.description, path=Path(path))
        self.oracle = oracle_for(self.subject.probe, description)

    @contextmanager
    def adapted(self, adapter: LoRARequest) -> Iterator[bool]:
        """Compare with the model under a LoRA adapter; gives False where the oracle has none, and
        the certificate says so.
        """
        plain, tuned = self.oracle, self.oracle.adapted(adapter)
        if tuned is None:
            self.subject.believed.add(f"what LoRA adapters compute: {plain.name} has none")
        self.oracle = plain if tuned is None else tuned
        try:
            yield tuned is not None
        finally:
            self.oracle = plain

    # Comparing.

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return the oracle's logits after each token: (tokens, vocabulary)."""
        return np.asarray(self.oracle.logits(tokens), dtype=np.float64)

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """Return the oracle's log-probabilities after each token: (tokens, vocabulary)."""
        logits = self.logits(tokens)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def check_greedy(self, request: Request, what: str = "") -> int:
        """Compare a request's greedy ids with the oracle's, as far as they are decided: up to the
        first place where the two best are closer than twice the tolerance. Return how many were.
        """
        prompt, output, params = request.prompt, request.output, request.sampling
        rows = self.logits([*prompt, *output])
        ends = self.description.eos_token_ids
        for index, token in enumerate(output):
            row = edited(rows[len(prompt) - 1 + index], params, prompt, output[:index], ends)
            second, first = np.sort(row)[-2:]
            if first - second <= 2 * self.tolerance:
                return index
            best = int(row.argmax())
            expect(
                token == best,
                "greedy decoding takes the token of the highest logit, and the parameters of a "
                "request change its logits as SamplingParams says",
                seen=f"{what or 'a request alone'}: token {index} after the prompt {list(prompt)} "
                f"is {token}; {self.oracle.name} has {best}, ahead of it by "
                f"{row[best] - row[token]:.3g} (tolerance {self.tolerance:g})",
                where=ModelRunner.execute_model,
                do="Run this request alone in one chunk first: where that fails, look at weights, "
                "positions and the mask; else at block tables, slots and what rows share.",
            )
        return len(output)

    def scores(self, request: Request) -> Any:
        """Return the whole log-probabilities that a request of SCORED came with: (outputs,
        vocabulary).
        """
        return np.asarray([self.score_row(row) for row in request.logprobs])

    def score_row(self, logprobs: Logprobs, index: int = 0) -> Any:
        """Return one row over the whole vocabulary, by id. Column 0 has a token that is among the
        best ones, too: what both say of it must be one.
        """
        ids, values = logprobs.ids[index], logprobs.values[index]
        row = np.full(self.vocab_size, np.nan)
        row[list(ids)] = values
        expect(
            values[0] == row[ids[0]] or np.isnan(row[ids[0]]),
            "column 0 has the value of its own token",
            seen=f"row {index}: token {ids[0]} has {values[0]:.5g} in column 0 and "
            f"{row[ids[0]]:.5g} among the best ones",
            where=Logprobs, do="Gather both from one array, by the same id.",
        )  # fmt: skip
        return row

    def check_scores(self, request: Request, what: str = "") -> None:
        """Compare the log-probabilities of a request of SCORED with the oracle's, all of them."""
        count = len(request.logprobs)
        rows = self.logprobs([*request.prompt, *request.output])
        wanted = rows[len(request.prompt) - 1 :][:count]
        self.check_close(self.scores(request), wanted, what or "a request alone")

    def check_close(self, seen: Any, wanted: Any, what: str) -> None:
        """Compare log-probabilities with the oracle's, within the tolerance."""
        if seen.shape != wanted.shape:
            violated(
                "each generated token has one row of log-probabilities",
                seen=f"{what}: {len(seen)} rows for {len(wanted)} tokens",
                where=Logprobs, do="Return a row in each step in which the request is sampled.",
            )  # fmt: skip
        # Far down a distribution nobody is hurt by an error: what counts is weighed by its share.
        off = np.abs(np.exp(seen) - np.exp(wanted)) / np.maximum(np.exp(wanted), 1e-2)
        worst = np.unravel_index(np.nanargmax(off), off.shape)
        place, token = (int(each) for each in worst)
        expect(
            not np.isnan(seen).any() and off[worst] <= max(self.tolerance, 1e-6),
            "log-probabilities are those of the model's own logits",
            seen=f"{what}: row {place}, token {token}: {seen[worst]:.5g}, {self.oracle.name} has "
            f"{wanted[worst]:.5g} (tolerance {self.tolerance:g})",
            where=Logprobs,
            do="Compare the logits of that position with the reference; if only later rows differ, "
            "look at the KV cache: slots, block tables, positions.",
        )

    def execute(self, plan: SchedulerOutput) -> Any:
        """Run a plan as it is."""
        return self.executor.execute_model(plan)

    def run_alone(
        self, prompts: Sequence[Sequence[int]], length: int, sampling: SamplingParams = GREEDY
    ) -> list[Request]:
        """Run each prompt by itself."""
        return [self.steps.alone(prompt, length, sampling) for prompt in prompts]


def scored_if(supported: bool) -> SamplingParams:
    """Return SCORED where log-probabilities can be asked for, else GREEDY."""
    return SCORED if supported else GREEDY
