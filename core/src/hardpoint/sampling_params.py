"""How the tokens of one request are chosen and when it ends. Values are checked at construction.

Ranges follow the field's habit (OpenAI's and vLLM's public parameters). Token ids are checked
against the vocabulary by :meth:`SamplingParams.check_vocabulary`, when the model is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Attribute, evolve, field, fields, frozen

from hardpoint.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy."""
MIN_TEMPERATURE = 1e-2
"""Positive temperatures below this are raised to it: dividing by less overflows to no effect but
NaN.
"""


def _number(low: float, high: float, *, low_open: bool = False) -> Any:
    def check(owner: object, attribute: Attribute[float], value: object) -> None:
        good = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low < value if low_open else low <= value)
            and value <= high
        )
        if not good:
            bracket = "(" if low_open else "["
            shut = ")" if high == math.inf else "]"
            _refuse(attribute.name, value, f"must be a number in {bracket}{low:g}, {high:g}{shut}")

    return check


def _whole(low: int, *, optional: bool = False) -> Any:
    def check(owner: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            _refuse(
                attribute.name,
                value,
                f"must be a whole number of at least {low}" + (" or None" * optional),
            )

    return check


def _flag(owner: object, attribute: Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        _refuse(attribute.name, value, "must be true or false")


def _refuse(name: str, value: object, must: str) -> None:
    raise InvalidRequestError(f"{name} {must}, not {value!r}", field=name, value=value)


def _ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _some_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    return _ids(value) or ()


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


@frozen(kw_only=True)
class SamplingParams:
    """Parameters of one request.

    ``top_k`` 0 or -1 means off. ``seed`` makes draws a function of (seed, position) alone.
    ``max_tokens`` None means up to the context. ``logprobs`` k: the sampled token's and the k best;
    -1 means the whole vocabulary. ``stop`` strings need ``detokenize``. ``logit_bias`` maps id to
    an addition, clamped to +-100. ``allowed_token_ids`` are the only ids that can be drawn.
    ``extra_args`` reach custom logits processors untouched.
    """

    temperature: float = field(default=1.0, validator=_number(0, 2))
    top_p: float = field(default=1.0, validator=_number(0, 1, low_open=True))
    top_k: int = field(default=0, validator=_whole(-1))
    min_p: float = field(default=0.0, validator=_number(0, 1))
    presence_penalty: float = field(default=0.0, validator=_number(-2, 2))
    frequency_penalty: float = field(default=0.0, validator=_number(-2, 2))
    repetition_penalty: float = field(default=1.0, validator=_number(0, math.inf, low_open=True))
    seed: int | None = field(default=None, validator=_whole(0, optional=True))
    max_tokens: int | None = field(default=16, validator=_whole(1, optional=True))
    min_tokens: int = field(default=0, validator=_whole(0))
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_some_ids)
    ignore_eos: bool = field(default=False, validator=_flag)
    include_stop: bool = field(default=False, validator=_flag)
    detokenize: bool = field(default=True, validator=_flag)
    skip_special_tokens: bool = field(default=True, validator=_flag)
    n: int = field(default=1, validator=_whole(1))
    logprobs: int | None = field(default=None, validator=_whole(-1, optional=True))
    prompt_logprobs: int | None = field(default=None, validator=_whole(-1, optional=True))
    logprob_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    bad_words: tuple[str, ...] = field(default=(), converter=_strings)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    structured_outputs: Mapping[str, object] | None = None
    extra_args: Mapping[str, object] | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})"
            )
        if self.n > 1 and self.greedy:
            _refuse(
                "n", self.n, "must be 1 when temperature is 0: greedy answers would all be equal"
            )
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "needs detokenize: stop strings are looked for in the text")
        if any(not isinstance(text, str) or not text for text in self.stop):
            _refuse("stop", self.stop, "must be non-empty strings")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", self.allowed_token_ids, "must not be empty")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for value in getattr(self, name) or ():
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    _refuse(name, value, "must hold whole numbers of at least 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from plain data; an unknown name is an InvalidRequestError with the closest known
        names.
        """
        known = [attribute.name for attribute in fields(cls)]
        for name, value in values.items():
            if name not in known:
                from difflib import get_close_matches

                near = ", ".join(get_close_matches(name, known, 3)) or ", ".join(known)
                raise InvalidRequestError(
                    f"unknown sampling parameter {name!r} = {value!r}; did you mean: {near}?",
                    field=name,
                    value=value,
                )
        return cls(**values)  # type: ignore[arg-type]

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken (temperature below 1e-5); top-p, top-k and min-p
        then have no say.
        """
        return self.temperature < GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """The temperature to divide by; positive ones below 0.01 count as 0.01."""
        return max(self.temperature, MIN_TEMPERATURE)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with this seed (the driver gives every request one)."""
        return evolve(self, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id here is not below ``vocab_size``, or a count
        exceeds it.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            for value in getattr(self, name) or ():
                if not 0 <= value < vocab_size:
                    _refuse(
                        name, value, f"holds an id outside the vocabulary of {vocab_size} tokens"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                _refuse(name, value, f"must not exceed the vocabulary of {vocab_size} tokens")
