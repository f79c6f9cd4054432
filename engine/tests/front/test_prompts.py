"""What callers hand in is checked before anything is queued."""

from __future__ import annotations

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import LARGEST_SEED, SamplingParams
from hardpoint_engine.conversations import check_messages
from hardpoint_engine.prompts import (
    as_list,
    as_params,
    as_tokens,
    spelled,
    split,
)
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([[1], (2,)], [[1], (2,)]),
        ([], []),
        (iter(["a"]), ["a"]),
    ],
)
def test_one_prompt_or_several(given, expected):
    assert as_list(given) == expected


@pytest.mark.parametrize("given", [3, None, {"prompt": "hi"}])
def test_something_else_is_refused(given):
    with pytest.raises(InvalidRequestError, match="prompts must be"):
        as_list(given)


class Whole:
    """A whole number that is no int, as array libraries have them."""

    def __index__(self) -> int:
        return 7


def tokens(prompt):
    return as_tokens(prompt, ByteTokenizer(), 256).ids


def test_ids_become_plain_ints():
    assert tokens([Whole(), 0, 255]) == (7, 0, 255)
    assert [type(token) for token in tokens([Whole()])] == [int]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 256], "token 1 of the prompt is 256.*0 to 255"),
        ([-1], "token 0 of the prompt is -1"),
        ([1.0], "is 1.0"),
        ([True], "is True"),
        (["a"], "is 'a'"),
        (b"abc", "not bytes"),
        (5, "not int"),
        ("\udcff", "Unicode"),
    ],
)
def test_a_malformed_prompt_is_named(prompt, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tokens(prompt)
    assert caught.value.field == "prompt"


def test_an_empty_text_is_refused_even_if_the_model_puts_a_token_before_every_text():
    class Beginning(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return (1, *super().encode(text))

    assert as_tokens("a", Beginning(), 256).ids == (1, 97)
    with pytest.raises(InvalidRequestError, match="empty"):
        as_tokens("", Beginning(), 256)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        {"role": "user", "content": "x"},
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": " \n"}],
    ],
)
def test_a_conversation_without_a_word_is_refused(messages):
    with pytest.raises(InvalidRequestError, match=r"empty|must be"):
        check_messages(messages)


def test_parameters_fit_the_prompts():
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert as_params(None, 2) == [SamplingParams()] * 2
    assert as_params(one, 3) == [one] * 3
    assert as_params([one, two], 2) == [one, two]
    with pytest.raises(InvalidRequestError, match="1 sampling parameters were given for 2"):
        as_params([one], 2)
    with pytest.raises(InvalidRequestError, match="not dict"):
        as_params([{"max_tokens": 1}], 1)


def test_answers_of_one_request_draw_differently():
    parts = split(SamplingParams(n=3, seed=5, temperature=1))
    assert [(part.n, part.seed) for part in parts] == [(1, 5), (1, 6), (1, 7)]
    assert [part.seed for part in split(SamplingParams(n=2))] == [None, None]


def test_the_greatest_seed_counts_on_from_0():
    parts = split(SamplingParams(n=3, seed=LARGEST_SEED))
    assert [part.seed for part in parts] == [LARGEST_SEED, 0, 1]


def test_bad_words_are_spelled_as_ids_at_the_beginning_and_after_a_blank():
    tokenizer = ByteTokenizer()
    plain = SamplingParams()
    assert spelled(plain, tokenizer) is plain
    made = spelled(SamplingParams(bad_words=[" no"], bad_word_ids=[[7]]), tokenizer)
    assert made.bad_word_ids == ((7,), tuple(b"no"), tuple(b" no"))
    assert made.bad_words == (" no",)
