"""Every range of the sampling parameters, at its ends and just beyond; the error names the field
and the value.
"""

from __future__ import annotations

import math

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import SamplingParams

GOOD = [
    {"temperature": 0}, {"temperature": 2}, {"top_p": 1e-9}, {"top_p": 1}, {"top_k": -1},
    {"top_k": 0}, {"min_p": 0}, {"min_p": 1}, {"presence_penalty": -2}, {"presence_penalty": 2},
    {"frequency_penalty": -2}, {"frequency_penalty": 2}, {"repetition_penalty": 1e-9},
    {"seed": 0}, {"max_tokens": 1}, {"max_tokens": None}, {"min_tokens": 16}, {"logprobs": -1},
    {"logprobs": 0}, {"prompt_logprobs": -1}, {"n": 1}, {"n": 3}, {"stop": "a"},
    {"stop_token_ids": [0]}, {"allowed_token_ids": [0]}, {"logprob_token_ids": [0]},
]  # fmt: skip
BAD = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", "1"),
    ("temperature", True), ("temperature", None), ("top_p", 0), ("top_p", 1.1), ("top_k", -2),
    ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", -2.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", 2.1),
    ("repetition_penalty", 0), ("repetition_penalty", math.inf), ("seed", -1), ("seed", 1.0),
    ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2),
    ("prompt_logprobs", -2), ("n", 0), ("stop", ["a", ""]), ("stop", [1]),
    ("stop_token_ids", [-1]), ("allowed_token_ids", []), ("allowed_token_ids", [True]),
    ("logprob_token_ids", ["a"]), ("ignore_eos", 1), ("detokenize", "no"),
]  # fmt: skip


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_the_ends_of_a_range_belong_to_it(values):
    assert SamplingParams(**values) == SamplingParams.from_mapping(values)


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_what_lies_beyond_names_the_field_and_the_value(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    wrong = caught.value.value
    assert wrong is value or wrong == value or wrong == tuple(value) or wrong in value
    assert repr(wrong) in str(caught.value)


def test_parameters_that_contradict_each_other():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop=["a"], detokenize=False)
    with pytest.raises(InvalidRequestError, match="greedy"):
        SamplingParams(n=2, temperature=0)


def test_an_unknown_parameter_gets_its_close_matches():
    with pytest.raises(InvalidRequestError, match=r"'temprature' = 1; did you mean: temperature"):
        SamplingParams.from_mapping({"temprature": 1})


def test_small_temperatures_are_greedy_or_raised():
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams(temperature=0.005).effective_temperature == 0.01
    assert SamplingParams(temperature=0.02).effective_temperature == 0.02
