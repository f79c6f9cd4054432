"""One group of workers, its driver and its oracle: what the ModelRunner suite works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hardpoint.executor import Executor
from hardpoint.model_runner import ModelRunner

from hardpoint_conformance.contract import expect
from hardpoint_conformance.oracle import Oracle
from hardpoint_conformance.oracle_choice import oracle_for, tolerance_for
from hardpoint_conformance.steps import Steps
from hardpoint_conformance.subject import Subject


class Bench:
    """Workers that can execute; made once for the tests of a suite, anew after one that failed."""

    def __init__(self, subject: Subject, executor: Executor) -> None:
        self.subject = subject
        self.executor = executor
        self.steps = Steps(executor)
        description = executor.config.description
        if description is None:
            raise TypeError("a group without a model's description")
        self.vocab_size = description.vocab_size
        self.oracle: Oracle = oracle_for(subject.probe, description)
        subject.oracle = self.oracle.name
        self.tolerance = tolerance_for(subject.probe, executor.config.model.dtype)

    @classmethod
    def of(cls, subject: Subject) -> Bench:
        """Return the shared bench of ``subject``, without requests."""
        bench = subject.shared
        if not isinstance(bench, cls):
            bench = subject.shared = cls(subject, subject.ready())
        return bench

    def logprobs(self, tokens: Sequence[int]) -> Any:
        """Return the oracle's log-probabilities after each token: (tokens, vocabulary)."""
        logits = self.oracle.logits(tokens)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int], what: str = "") -> int:
        """Compare greedy ids with the oracle's, as far as they are decided: up to the first place
        where the two best are closer than twice the tolerance. Return how many were compared.
        """
        scores = self.logprobs([*prompt, *output])
        for index, token in enumerate(output):
            row = scores[len(prompt) - 1 + index]
            second, first = np.sort(row)[-2:]
            if first - second <= 2 * self.tolerance:
                return index
            best = int(row.argmax())
            expect(
                token == best,
                "greedy decoding takes the token of the highest logit",
                seen=f"{what}token {index} after prompt {list(prompt)} is {token}; {self.oracle.name} "
                f"has {best}, ahead of {token} by {row[best] - row[token]:.3g} (tolerance "
                f"{self.tolerance:g})",
                where=ModelRunner.execute_model,
                do="Look at this request alone first: positions, block table, mask, rotary angles.",
            )
        return len(output)
