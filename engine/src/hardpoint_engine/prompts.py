"""What callers hand in, checked and in one shape, before anything is queued. Driver side."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import LARGEST_SEED, SamplingParams

from hardpoint_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or token ids."""

MAX_N = 4096
"""The most answers to one prompt: each is a sequence of its own."""


@frozen(kw_only=True)
class PromptTokens:
    """A prompt as ids; ``text`` is None where ids were given."""

    text: str | None
    ids: tuple[int, ...]


_NO_PROMPTS = (bytes, bytearray, memoryview, Mapping)
"""What could be gone through like a list of ids or texts and is meant as neither."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, as a list. A flat list of whole numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, _NO_PROMPTS) or not is_list(prompts):
        raise InvalidRequestError(
            f"prompts must be text, token ids, or a list of them, not {type(prompts).__name__}",
            field="prompts",
            value=prompts,
        )
    found: list[Any] = list(prompts)
    one = bool(found) and not any(isinstance(item, str) or is_list(item) for item in found)
    return [found] if one else found


def is_list(item: object) -> bool:
    """Whether ``item`` can be gone through."""
    return hasattr(item, "__iter__")


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return one SamplingParams for each of ``count`` prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    found = [as_one_params(item) for item in (params if is_list(params) else [params])]
    if len(found) != count:
        raise InvalidRequestError(
            f"{len(found)} sampling parameters were given for {count} prompts; give one for all, "
            "or one for each",
            field="sampling_params",
            value=len(found),
        )
    return found


def as_one_params(params: object) -> SamplingParams:
    """Return one SamplingParams, the defaults for None."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    raise InvalidRequestError(
        f"sampling parameters must be SamplingParams, not {type(params).__name__}",
        field="sampling_params",
        value=params,
    )


def as_tokens(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, *, add_special_tokens: bool = True
) -> PromptTokens:
    """Return ``prompt`` as ids. Raises InvalidRequestError for an empty or malformed one."""
    if isinstance(prompt, str):
        if not prompt:
            raise empty(prompt)
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return PromptTokens(text=prompt, ids=check_ids(ids, vocab_size))
    if not is_list(prompt) or isinstance(prompt, _NO_PROMPTS):
        raise InvalidRequestError(
            f"a prompt must be text or token ids, not {type(prompt).__name__}",
            field="prompt",
            value=prompt,
        )
    return PromptTokens(text=None, ids=check_ids(prompt, vocab_size))


def check_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return ``ids`` as plain ints of the vocabulary, at least one."""
    checked = []
    for position, value in enumerate(ids):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if isinstance(value, bool) or not 0 <= number < vocab_size:
            raise InvalidRequestError(
                f"token {position} of the prompt is {value!r}; it must be a whole number from 0 to "
                f"{vocab_size - 1}, the last id of this model's vocabulary",
                field="prompt",
                value=value,
            )
        checked.append(number)
    if not checked:
        raise empty(ids)
    return tuple(checked)


def empty(value: object) -> InvalidRequestError:
    """Return what an empty prompt is refused by."""
    return InvalidRequestError(
        "the prompt is empty; give at least one character or token", field="prompt", value=value
    )


def numbered(error: InvalidRequestError, index: int, count: int) -> InvalidRequestError:
    """Return ``error`` saying which of several prompts it is about."""
    if count == 1:
        return error
    return InvalidRequestError(
        f"prompt {index + 1} of {count}: {error}", field=error.field, value=error.value
    )


def spelled(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with the ids of ``bad_words`` in ``bad_word_ids``, each word as it
    begins a text and as it follows a blank: workers have no tokenizer.
    """
    if not sampling.bad_words:
        return sampling
    texts = [blank + word.lstrip() for word in sampling.bad_words for blank in ("", " ")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    ids = dict.fromkeys((*sampling.bad_word_ids, *filter(None, found)))
    return evolve(sampling, bad_word_ids=tuple(ids))


def split(sampling: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each of ``sampling.n`` answers; a given seed counts up, from the
    greatest to 0.

    Raises InvalidRequestError for more than ``MAX_N``.
    """
    if sampling.n == 1:
        return [sampling]
    if sampling.n > MAX_N:
        raise InvalidRequestError(
            f"n is {sampling.n}, and the most answers to one prompt are {MAX_N}: give the prompt "
            "several times, or generate several times",
            field="n",
            value=sampling.n,
        )
    seed = sampling.seed
    return [
        evolve(sampling, n=1, seed=None if seed is None else (seed + index) % (LARGEST_SEED + 1))
        for index in range(sampling.n)
    ]
