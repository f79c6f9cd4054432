"""The sampling parameters that are kept as columns. A free slot is greedy and asks nothing."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import Any

from attrs import frozen
from hardpoint.sampling_params import SamplingParams

GREEDY = -1.0
"""The temperature of a request that takes the best token."""
LARGEST_K = 2**31 - 1
FLOAT_RANGE = (2.0**-126, 2.0**127)
"""What a factor may be in float32: beyond, it would be 0, or infinite and 0 times it no number."""


class Feature(IntFlag):
    """Rare wishes, so that a step sees at once that nobody in it has one."""

    PENALTIES = 1
    LOGPROBS = 2
    ALLOWED = 4
    BIAS = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32


@frozen(kw_only=True)
class Column:
    """One value a request: ``read`` takes it from the parameters."""

    name: str
    dtype: str
    default: float
    read: Callable[[SamplingParams], Any]


def features(sampling: SamplingParams) -> int:
    """Return the Feature bits of a request's parameters."""
    wishes = {
        Feature.PENALTIES: sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0,
        Feature.LOGPROBS: sampling.logprobs is not None or sampling.logprob_token_ids,
        Feature.ALLOWED: sampling.allowed_token_ids is not None,
        Feature.BIAS: sampling.logit_bias,
        Feature.MIN_TOKENS: sampling.min_tokens > 0,
        Feature.BAD_WORDS: sampling.bad_word_ids,
    }
    return sum(int(bit) for bit, asked in wishes.items() if asked)


def _drawn(value: Callable[[SamplingParams], float], greedy: float) -> Callable[..., float]:
    return lambda sampling: greedy if sampling.greedy else value(sampling)


SAMPLING_COLUMNS = (
    Column(
        name="temperature",
        dtype="float32",
        default=GREEDY,
        read=_drawn(lambda sampling: sampling.effective_temperature, GREEDY),
    ),
    Column(
        name="min_p", dtype="float32", default=0.0, read=_drawn(lambda sampling: sampling.min_p, 0)
    ),
    Column(
        name="top_p",
        dtype="float32",
        default=1.0,
        read=_drawn(lambda sampling: max(sampling.top_p, FLOAT_RANGE[0]), 1),
    ),
    Column(
        name="top_k",
        dtype="int32",
        default=0,
        read=_drawn(lambda sampling: min(max(sampling.top_k, 0), LARGEST_K), 0),
    ),
    Column(
        name="repetition_penalty",
        dtype="float32",
        default=1.0,
        read=lambda sampling: min(max(sampling.repetition_penalty, FLOAT_RANGE[0]), FLOAT_RANGE[1]),
    ),
    Column(
        name="frequency_penalty",
        dtype="float32",
        default=0.0,
        read=lambda sampling: sampling.frequency_penalty,
    ),
    Column(
        name="presence_penalty",
        dtype="float32",
        default=0.0,
        read=lambda sampling: sampling.presence_penalty,
    ),
    Column(name="features", dtype="int32", default=0, read=features),
)
