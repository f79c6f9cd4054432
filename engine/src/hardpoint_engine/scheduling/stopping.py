"""When a request has enough tokens: the rules that need no text. Stop strings are the front's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import frozen
from hardpoint.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@frozen
class Stop:
    """Why a request ended, and the stop token id if it was the request that named it."""

    reason: FinishReason
    token: int | None = None


LENGTH = Stop("length")
END_OF_TEXT = Stop("stop")


@frozen(kw_only=True)
class StopRule:
    """One request's rule.

    ``stop_ids`` end it once more than ``min_tokens`` tokens were generated (the sampler bars them
    until ``min_tokens`` are there, row by row). ``eos_ids`` are those among them that the model
    itself names. ``max_total`` counts prompt and output.
    """

    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    min_tokens: int
    max_total: int

    @classmethod
    def of(
        cls, sampling: SamplingParams, num_prompt: int, eos_ids: Iterable[int], max_model_len: int
    ) -> StopRule:
        """Build the rule of a request with ``num_prompt`` prompt tokens. ``max_tokens`` None means
        up to ``max_model_len``.
        """
        eos = frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        room = max_model_len if sampling.max_tokens is None else num_prompt + sampling.max_tokens
        return cls(
            stop_ids=eos | frozenset(sampling.stop_token_ids),
            eos_ids=eos,
            min_tokens=sampling.min_tokens,
            max_total=min(room, max_model_len),
        )

    def judge(self, token: int, num_output: int, num_total: int) -> Stop | None:
        """Say whether the request ends with ``token``, which is included in both counts."""
        if token in self.stop_ids and num_output > self.min_tokens:
            return END_OF_TEXT if token in self.eos_ids else Stop("stop", token)
        return LENGTH if num_total >= self.max_total else None
