"""How the tokens of one request are chosen and when it ends. Values are checked at construction.

Ranges follow the field's habit (OpenAI's and vLLM's public parameters). Token ids are checked
against the vocabulary by :meth:`SamplingParams.check_vocabulary`, when the model is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, cast

from attrs import Attribute, evolve, field, fields, frozen

from hardpoint.errors import InvalidRequestError
from hardpoint.records import shown

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy."""
MIN_TEMPERATURE = 1e-2
"""Positive temperatures below this are raised to it: dividing by less overflows to no effect but
NaN.
"""
_LARGEST = 2**63 - 1
LARGEST_SEED = 2**64 - 1
"""Seeds are 64 bits."""
BIAS_BOUND = 100.0
"""Greatest absolute logit bias; more is clamped to it."""
MAX_STOPS = 64
"""Stop strings of one request."""
MAX_STOP_LENGTH = 4096
"""Characters of a stop string."""
MAX_BAD_WORDS = 1024
"""Bad words of one request."""
MAX_BAD_WORD_CHARACTERS = 2**14
"""Characters of all bad words of one request together."""
MAX_BAD_WORD_LISTS = 4 * MAX_BAD_WORDS
"""Lists of ids of one request's bad words, spellings of the texts included."""
MAX_BAD_WORD_IDS = 16 * MAX_BAD_WORD_CHARACTERS
"""Ids of all these lists together: more than any spelling of as many characters has."""
_ID = "must hold whole numbers of at least 0"

# Converters make plain values of what looks like one (numpy's scalars, any iterable), and leave all
# else as it is; validators refuse what is not exactly plain. So nothing but InvalidRequestError
# comes out, and nothing but plain data goes on.


def _plain(read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except Exception:  # noqa: BLE001 - whatever it raised, it is refused by name
        return value


def _float(value: SupportsFloat | SupportsIndex) -> float:
    kind, kept = type(value), cast("float", value)
    like = hasattr(kind, "__float__") or hasattr(kind, "__index__")
    return cast("float", _plain(float, value)) if like and kind is not bool else kept


def _int(value: SupportsIndex) -> int:
    return cast("int", value if type(value) is bool else _plain(operator.index, value))


def _int_or_none(value: SupportsIndex | None) -> int | None:
    return None if value is None else _int(value)


def _items(value: Any) -> Any:
    return value if isinstance(value, str | bytes | Mapping) else _plain(tuple, value)


def _ids(value: Iterable[SupportsIndex] | None) -> tuple[int, ...] | None:
    items = _items(value)
    return tuple(map(_int, items)) if type(items) is tuple else items


def _some_ids(value: Iterable[SupportsIndex] | None) -> tuple[int, ...]:
    return cast("tuple[int, ...]", () if value is None else _ids(value))


def _id_lists(value: Iterable[Iterable[SupportsIndex]]) -> tuple[tuple[int, ...], ...]:
    items = _items(value)
    made = tuple(map(_ids, items)) if type(items) is tuple else items
    return cast("tuple[tuple[int, ...], ...]", made)


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    one = () if value is None else (value,) if isinstance(value, str) else _items(value)
    return cast("tuple[str, ...]", one)


def _clamped(bias: Any) -> Any:
    # Comparisons keep what is no number as it is, which is refused by name.
    return bias if type(bias) is not float else min(max(bias, -BIAS_BOUND), BIAS_BOUND)


def _bias(value: Mapping[Any, SupportsFloat] | None) -> Mapping[int, float] | None:
    def read(pairs: Mapping[Any, Any]) -> dict[int, float]:
        return {_int(token): _clamped(_float(pairs[token])) for token in pairs}

    return cast("Mapping[int, float]", _plain(read, value) if isinstance(value, Mapping) else value)


def _refuse(name: str, value: object, must: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {must}, not {shown(value)}", field=name, value=value)


def _number(low: float, high: float, *, low_open: bool = False) -> Any:
    def check(owner: object, attribute: Attribute[float], value: object) -> None:
        good = (
            type(value) is float
            and math.isfinite(value)
            and (low < value if low_open else low <= value)
            and value <= high
        )
        if not good:
            bracket = "(" if low_open else "["
            shut = ")" if high == math.inf else "]"
            _refuse(attribute.name, value, f"must be a number in {bracket}{low:g}, {high:g}{shut}")

    return check


def _whole(low: int, high: int = _LARGEST, *, optional: bool = False) -> Any:
    def check(owner: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and optional:
            return
        if type(value) is not int or value < low:
            must = f"must be a whole number of at least {low}" + (" or None" * optional)
            _refuse(attribute.name, value, must)
        if value > high:
            _refuse(attribute.name, value, f"must be a whole number of at most {high}")

    return check


def _flag(owner: object, attribute: Attribute[bool], value: object) -> None:
    if type(value) is not bool:
        _refuse(attribute.name, value, "must be true or false")


def _token_ids(owner: object, attribute: Attribute[Any], value: object) -> None:
    if value is None and attribute.default is None:
        return
    if type(value) is not tuple:
        _refuse(attribute.name, value, "must be a list of token ids")
    for token in value:
        if type(token) is not int or token < 0:
            _refuse(attribute.name, token, _ID)


def _token_id_lists(owner: object, attribute: Attribute[Any], value: object) -> None:
    if type(value) is not tuple or not all(type(ids) is tuple and ids for ids in value):
        _refuse(attribute.name, value, "must be a list of non-empty lists of token ids")
    total = sum(map(len, value))
    if len(value) > MAX_BAD_WORD_LISTS:
        _refuse(attribute.name, len(value), f"must be at most {MAX_BAD_WORD_LISTS} lists")
    if total > MAX_BAD_WORD_IDS:
        _refuse(attribute.name, total, f"must hold at most {MAX_BAD_WORD_IDS} ids in all")
    for ids in value:
        _token_ids(owner, attribute, ids)


def _texts(owner: object, attribute: Attribute[Any], value: object) -> None:
    if type(value) is not tuple or not all(isinstance(text, str) and text for text in value):
        _refuse(attribute.name, value, "must be non-empty strings")


def _stops(owner: object, attribute: Attribute[Any], value: Any) -> None:
    _texts(owner, attribute, value)
    if len(value) > MAX_STOPS:
        _refuse(attribute.name, len(value), f"must be at most {MAX_STOPS} strings")
    longest = max(map(len, value), default=0)
    if longest > MAX_STOP_LENGTH:
        must = f"must hold strings of at most {MAX_STOP_LENGTH} characters"
        _refuse(attribute.name, longest, must)


def _words(owner: object, attribute: Attribute[Any], value: Any) -> None:
    _texts(owner, attribute, value)
    if len(value) > MAX_BAD_WORDS:
        _refuse(attribute.name, len(value), f"must be at most {MAX_BAD_WORDS} words")
    total = sum(map(len, value))
    if total > MAX_BAD_WORD_CHARACTERS:
        must = f"must hold at most {MAX_BAD_WORD_CHARACTERS} characters in all"
        _refuse(attribute.name, total, must)


def _biases(owner: object, attribute: Attribute[Any], value: object) -> None:
    if value is None:
        return
    if type(value) is not dict:
        _refuse(attribute.name, value, "must map token ids to numbers")
    for token, number in value.items():
        if type(token) is not int or token < 0:
            _refuse(attribute.name, token, _ID)
        if type(number) is not float or math.isnan(number):
            _refuse(attribute.name, number, f"must add a number to token {token}")


def _named(owner: object, attribute: Attribute[Any], value: object) -> None:
    if value is None:
        return
    names = _plain(list, value) if isinstance(value, Mapping) else value
    if type(names) is not list or not all(isinstance(name, str) for name in names):
        _refuse(attribute.name, value, "must be a mapping with names as keys")


@frozen(kw_only=True)
class SamplingParams:
    """Parameters of one request.

    ``top_k`` 0 or -1 means off. ``seed`` makes draws a function of (seed, position) alone.
    ``max_tokens`` None means up to the context. ``logprobs`` k: the sampled token's and the k best;
    -1 means the whole vocabulary. ``stop`` strings need ``detokenize``. ``logit_bias`` maps id to
    an addition, clamped to +-100. ``allowed_token_ids`` are the only ids that can be drawn.
    ``bad_words`` may not be generated: the driver, which has the tokenizer, adds their spellings to
    ``bad_word_ids``; of each the last id is forbidden where the answer ends with the others.
    ``extra_args`` reach custom logits processors untouched. Numbers may be anything with
    ``__index__`` or ``__float__`` (numpy's scalars); they are kept as plain ones.
    """

    temperature: float = field(default=1.0, converter=_float, validator=_number(0, 2))
    top_p: float = field(default=1.0, converter=_float, validator=_number(0, 1, low_open=True))
    top_k: int = field(default=0, converter=_int, validator=_whole(-1))
    min_p: float = field(default=0.0, converter=_float, validator=_number(0, 1))
    presence_penalty: float = field(default=0.0, converter=_float, validator=_number(-2, 2))
    frequency_penalty: float = field(default=0.0, converter=_float, validator=_number(-2, 2))
    repetition_penalty: float = field(
        default=1.0, converter=_float, validator=_number(0, math.inf, low_open=True)
    )
    seed: int | None = field(
        default=None, converter=_int_or_none, validator=_whole(0, LARGEST_SEED, optional=True)
    )
    max_tokens: int | None = field(
        default=16, converter=_int_or_none, validator=_whole(1, optional=True)
    )
    min_tokens: int = field(default=0, converter=_int, validator=_whole(0))
    stop: tuple[str, ...] = field(default=(), converter=_strings, validator=_stops)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_some_ids, validator=_token_ids)
    ignore_eos: bool = field(default=False, validator=_flag)
    include_stop: bool = field(default=False, validator=_flag)
    detokenize: bool = field(default=True, validator=_flag)
    skip_special_tokens: bool = field(default=True, validator=_flag)
    n: int = field(default=1, converter=_int, validator=_whole(1))
    logprobs: int | None = field(
        default=None, converter=_int_or_none, validator=_whole(-1, optional=True)
    )
    prompt_logprobs: int | None = field(
        default=None, converter=_int_or_none, validator=_whole(-1, optional=True)
    )
    logprob_token_ids: tuple[int, ...] | None = field(
        default=None, converter=_ids, validator=_token_ids
    )
    bad_words: tuple[str, ...] = field(default=(), converter=_strings, validator=_words)
    bad_word_ids: tuple[tuple[int, ...], ...] = field(
        default=(), converter=_id_lists, validator=_token_id_lists
    )
    logit_bias: Mapping[int, float] | None = field(default=None, converter=_bias, validator=_biases)
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None, converter=_ids, validator=_token_ids
    )
    structured_outputs: Mapping[str, object] | None = field(default=None, validator=_named)
    extra_args: Mapping[str, object] | None = field(default=None, validator=_named)

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
        if self.allowed_token_ids == ():
            _refuse("allowed_token_ids", self.allowed_token_ids, "must not be empty")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from plain data; an unknown name is an InvalidRequestError with the closest known
        names.
        """
        known = [attribute.name for attribute in fields(cls)]
        if not isinstance(values, Mapping):
            _refuse("sampling", values, "must be a mapping of sampling parameters")
        for name, value in values.items():
            if name not in known:
                from difflib import get_close_matches

                near = ", ".join(get_close_matches(str(name), known, 3)) or ", ".join(known)
                raise InvalidRequestError(
                    f"unknown sampling parameter {shown(name)} = {shown(value)}; "
                    f"did you mean: {near}?",
                    field=str(name),
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

    def early_ends(
        self,
        num_output: int,
        eos_token_ids: Iterable[int],
        form: Iterable[int] | None = None,
    ) -> frozenset[int]:
        """Return the ids that may not come after ``num_output`` ones, because they would end the
        answer before ``min_tokens``: stop ids, and the end of sequence unless it is ignored.

        Where they are all that ``allowed_token_ids`` and the ``form`` of a structured answer (the
        ids that it allows next) leave, they stay allowed.
        """
        if num_output >= self.min_tokens:
            return frozenset()
        ends = frozenset(self.stop_token_ids)
        if not self.ignore_eos:
            ends |= frozenset(eos_token_ids)
        allowed = self.allowed_token_ids
        if allowed is not None and form is not None:
            form = set(form).intersection(allowed)
        left = allowed if form is None else form
        return frozenset() if left is not None and ends.issuperset(left) else ends

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
        for value in (token for word in self.bad_word_ids for token in word):
            if not 0 <= value < vocab_size:
                _refuse(
                    "bad_word_ids",
                    value,
                    f"holds an id outside the vocabulary of {vocab_size} tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                _refuse(name, value, f"must not exceed the vocabulary of {vocab_size} tokens")
