"""The sampling parameters that are kept as columns. A padding row is greedy and asks nothing.

A greedy request's temperature is 0, and top-k, top-p and min-p are off for it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from hardpoint_runtime.batch.columns import Column

if TYPE_CHECKING:
    from hardpoint.messages import NewRequestData
    from hardpoint.sampling_params import SamplingParams


TOP_K_BOUND = 1 << 31
"""No vocabulary is as large, so more means the same; more than 63 bits fit no column."""
FLOAT32_RANGE = (2.0**-126, 2.0**127)
"""What a factor may be in float32: beyond, it would be 0, or infinite and 0 times it no number."""


class Feature(IntFlag):
    """Rare wishes of a request, so that a step can see at once that nobody in it has one."""

    PENALTIES = 1
    LOGPROBS = 2
    ALLOWED = 4
    BIAS = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32
    PROMPT_LOGPROBS = 64


def features(sampling: SamplingParams) -> int:
    """Return the Feature bits of a request's parameters."""
    wishes = {
        Feature.PENALTIES: sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0,
        Feature.LOGPROBS: sampling.logprobs is not None or sampling.logprob_token_ids,
        Feature.ALLOWED: sampling.allowed_token_ids is not None,
        Feature.BIAS: sampling.logit_bias,
        Feature.MIN_TOKENS: sampling.min_tokens > 0
        and (sampling.stop_token_ids or not sampling.ignore_eos),
        Feature.BAD_WORDS: sampling.bad_word_ids,
        Feature.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
    }
    return sum(int(bit) for bit, asked in wishes.items() if asked)


def _unless_greedy(name: str) -> Callable[[NewRequestData], Any]:
    def read(request: NewRequestData) -> Any:
        sampling = request.sampling
        return None if sampling.greedy else getattr(sampling, name)

    return read


def _bounded(value: Any, low: Any, high: Any) -> Any:
    return min(max(value, low), high)


SAMPLING_COLUMNS = (
    Column(
        name="temperature",
        dtype="float32",
        default=0.0,
        pad=0.0,
        read=_unless_greedy("effective_temperature"),
    ),
    Column(
        name="top_k",
        dtype="int64",
        default=0,
        pad=0,
        read=lambda new: 0 if new.sampling.greedy else _bounded(new.sampling.top_k, 0, TOP_K_BOUND),
    ),
    Column(
        name="top_p",
        dtype="float32",
        default=1.0,
        pad=1.0,
        read=lambda new: 1.0 if new.sampling.greedy else max(new.sampling.top_p, FLOAT32_RANGE[0]),
    ),
    Column(name="min_p", dtype="float32", default=0.0, pad=0.0, read=_unless_greedy("min_p")),
    Column(
        name="presence_penalty",
        dtype="float32",
        default=0.0,
        pad=0.0,
        read=lambda new: new.sampling.presence_penalty,
    ),
    Column(
        name="frequency_penalty",
        dtype="float32",
        default=0.0,
        pad=0.0,
        read=lambda new: new.sampling.frequency_penalty,
    ),
    Column(
        name="repetition_penalty",
        dtype="float32",
        default=1.0,
        pad=1.0,
        read=lambda new: _bounded(new.sampling.repetition_penalty, *FLOAT32_RANGE),
    ),
    Column(
        name="features",
        dtype="int64",
        default=0,
        pad=0,
        read=lambda new: features(new.sampling),
    ),
)
"""Declared with the request columns; a step gathers them by name."""
