"""Sampling parameters: from whatever is given, a plain record or an error naming the field."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from attrs import fields
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    SamplingParams,
)

FIELDS = [attribute.name for attribute in fields(SamplingParams)]


class Number:
    """Like numpy's scalars: convertible, no int and no float."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)


class Whole(Number):
    def __index__(self):
        return self.value


class Hostile:
    def __getattribute__(self, name):
        if name == "__class__":
            return type(self)
        raise OSError("no attribute")

    def __iter__(self):
        raise OSError("no items")

    def __index__(self):
        raise OSError("no number")

    __float__ = __len__ = __index__

    def __repr__(self):
        raise OSError("no text")


class HostileMapping(dict):
    def __iter__(self):
        raise OSError("no keys")

    items = keys = __iter__


JUNK = [
    None, True, False, 0, 1, -1, 5, 2**63 - 1, 2**63, 2**64, -(2**70), 10**5000, 0.5, -0.0, 1e300,
    float("nan"), float("inf"), 1j, "", "x", "5", b"", b"5", bytearray(b"1"), memoryview(b"1"),
    (), [], {}, set(), [1], [1.5], ["x"], [""], [None], [True], [[1]], [10**5000], (1, "a"),
    {1: 1.0}, {"1": 1.0}, {1: "x"}, {1: float("nan")}, {None: 1}, {"a": object()}, {-1: 1},
    range(3), object(), int, len, Number(1), Whole(1), Hostile(), HostileMapping(a=1), [Hostile()],
    {1: Hostile()}, Ellipsis, NotImplemented,
]  # fmt: skip


def refusal(values):
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.parametrize("name", FIELDS)
def test_junk_is_a_record_or_an_error_that_names_it(name):
    for value in JUNK:
        error = refusal({name: value})
        if error is not None:
            assert error.field == name, value
            assert str(error).startswith(name)
            assert len(str(error)) < 1000


def test_junk_in_several_fields_is_never_another_error():
    draw = random.Random(5)
    tried = [{name: draw.choice(JUNK) for name in draw.sample(FIELDS, 3)} for _ in range(3000)]
    assert 1000 < sum(refusal(values) is not None for values in tried) < 3000


NOT_A_LIST = [
    (name, 5) for name in FIELDS if name.endswith("_ids") or name in ("stop", "bad_words")
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *NOT_A_LIST,
        ("stop_token_ids", "12"),
        ("stop", {"a": 1}),
        ("stop", [b"a"]),
        ("bad_words", [""]),
        ("bad_word_ids", [[]]),
        ("bad_word_ids", [5]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [1]),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: True}),
        ("structured_outputs", "x"),
        ("extra_args", [1]),
        ("extra_args", {1: 2}),
        ("top_k", 2**63),
        ("seed", 2**64),
        ("top_k", 1.0),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name} must ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_the_bounds_themselves_are_fine():
    assert SamplingParams(top_k=2**63 - 1, seed=2**64 - 1).seed == 2**64 - 1


def test_what_is_like_a_number_is_kept_as_a_plain_one():
    made = SamplingParams(
        temperature=Number(0.5), top_p=1, top_k=Whole(3), seed=Whole(4),
        stop_token_ids=itertools.chain([Whole(1)], [2]), allowed_token_ids=range(2),
        logit_bias={Whole(1): Number(2)},
    )  # fmt: skip
    assert (made.temperature, made.top_p, made.top_k, made.seed) == (0.5, 1.0, 3, 4)
    assert (made.stop_token_ids, made.allowed_token_ids) == ((1, 2), (0, 1))
    assert made.logit_bias == {1: 2.0}
    kept = [made.temperature, made.top_p, made.top_k, made.stop_token_ids[0], *made.logit_bias]
    assert [type(each) for each in kept] == [float, float, int, int, int]


@pytest.mark.parametrize("values", [5, [("n", 1)], {5: 1}, {"temprature": 10**5000}])
def test_a_mapping_of_junk_is_refused(values):
    with pytest.raises(InvalidRequestError):
        SamplingParams.from_mapping(values)


def test_the_ids_of_bad_words_are_checked_against_the_vocabulary():
    made = SamplingParams(bad_word_ids=[[1, 2], [9]])
    assert made.bad_word_ids == ((1, 2), (9,))
    made.check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match=r"bad_word_ids .*vocabulary of 9 tokens"):
        made.check_vocabulary(9)


def test_biases_are_clamped():
    made = SamplingParams(logit_bias={1: 1e300, 2: -math.inf, 3: 99, 4: Number(-101)})
    assert made.logit_bias == {1: 100.0, 2: -100.0, 3: 99.0, 4: -100.0}
    assert refusal({"logit_bias": {1: math.nan}}).field == "logit_bias"


def test_bad_words_are_bounded_in_number_and_length():
    """What they spell fits the bounds of ids, whatever the tokenizer."""
    longest = MAX_BAD_WORD_CHARACTERS // MAX_BAD_WORDS
    good = SamplingParams(bad_words=[f"{n:0{longest}}" for n in range(MAX_BAD_WORDS)])
    spelled = [list(f"{blank}{word}".encode()) for word in good.bad_words for blank in ("", " ")]
    assert len(SamplingParams(bad_word_ids=spelled).bad_word_ids) == 2 * MAX_BAD_WORDS
    emoji = list((" " + "\N{GRINNING FACE}" * MAX_BAD_WORD_CHARACTERS).encode())
    assert SamplingParams(bad_word_ids=[emoji[1:], emoji]).bad_word_ids[1][0] == 32
    for name, value, words in (
        ("bad_words", ["x"] * 1025, "bad_words must be at most 1024 words, not 1025"),
        ("bad_words", ["x" * 16385], "bad_words must hold at most 16384 characters in all"),
        ("bad_word_ids", [[1]] * 4097, "bad_word_ids must be at most 4096 lists, not 4097"),
        ("bad_word_ids", [[1] * 2**17, [1] * 2**17, [1]], "must hold at most 262144 ids in all"),
    ):
        error = refusal({name: value})
        assert error.field == name
        assert words in str(error)


def test_stop_strings_are_bounded_in_number_and_length():
    good = SamplingParams(stop=[f"{n:04}" * (MAX_STOP_LENGTH // 4) for n in range(MAX_STOPS)])
    assert len(good.stop) == MAX_STOPS
    for stop, words in (
        (["x"] * (MAX_STOPS + 1), "stop must be at most 64 strings, not 65"),
        (["a", "x" * (MAX_STOP_LENGTH + 1)], "stop must hold strings of at most 4096 characters"),
    ):
        error = refusal({"stop": stop})
        assert error.field == "stop"
        assert words in str(error)


@pytest.mark.parametrize(
    ("params", "num_output", "ends"),
    [
        ({"min_tokens": 2}, 0, {5}), ({"min_tokens": 2}, 1, {5}), ({"min_tokens": 2}, 2, set()),
        ({"min_tokens": 2, "stop_token_ids": [7]}, 0, {5, 7}),
        ({"min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}, 0, {7}),
        ({"min_tokens": 2, "allowed_token_ids": [5]}, 0, set()),
        ({"min_tokens": 2, "allowed_token_ids": [5, 6]}, 0, {5}),
    ],
)  # fmt: skip
def test_no_end_before_the_least_length(params, num_output, ends):
    assert SamplingParams(**params).early_ends(num_output, (5,)) == ends


@pytest.mark.parametrize(
    ("allowed", "form", "ends"),
    [
        (None, [5], set()), (None, [5, 7], set()), (None, [5, 6], {5, 7}), ([5, 8], [7, 8], {5, 7}),
        ([5, 8], [5, 9], set()), ([8], [9], set()),
    ],
)  # fmt: skip
def test_ends_stay_where_nothing_else_is_left(allowed, form, ends):
    wish = SamplingParams(min_tokens=2, stop_token_ids=[7], allowed_token_ids=allowed)
    assert wish.early_ends(0, (5,), form) == ends
