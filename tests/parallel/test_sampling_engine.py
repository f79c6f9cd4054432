"""Forms, processors and scores through whole engines: one worker, tensor shards, graphs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.logits_processor import LogitsProcessor
from hardpoint_engine import SamplingParams


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_engine = _module("small_engine")
processors = _module("processors")
processors.NoThirteen.__module__ = "__main__"  # so that the object travels by value

REGEX = r"[a-d]{2,9}(x|yz){3}"
CHOICES = ("left", "right", "straight on")
MORE = {"max_tokens": 16, "ignore_eos": True}
REQUESTS = [
    ("regex", SamplingParams(structured_outputs={"regex": REGEX}, seed=1, max_tokens=40)),
    ("choice", SamplingParams(structured_outputs={"choice": CHOICES}, seed=2, n=2, max_tokens=40)),
    ("free", SamplingParams(temperature=0, prompt_logprobs=2, **MORE)),
    ("banned", SamplingParams(seed=3, extra_args={"ban": 7}, top_k=40, **MORE)),
    ("words", SamplingParams(temperature=0, bad_word_ids=[[i] for i in range(0, 250, 2)], **MORE)),
    ("forced", SamplingParams(seed=4, logit_bias={9: 100}, **MORE)),
    ("allowed", SamplingParams(seed=6, allowed_token_ids=(3, 4, 5), **MORE)),
    ("ends", SamplingParams(temperature=0, logit_bias={5: 100}, stop_token_ids=[5], min_tokens=4)),
    ("listed", SamplingParams(temperature=0, logprobs=1, logprob_token_ids=[3, 4], **MORE)),
    ("free too", SamplingParams(seed=5, temperature=1.5, **MORE)),
]


def found(llm, requests):
    """Text -> (ids of its answers, texts, scores of the prompt)."""
    results = llm.generate([text for text, _ in requests], [each for _, each in requests])
    return {
        text: (
            [answer.token_ids for answer in result.outputs],
            [answer.text for answer in result.outputs],
            result.prompt_logprobs,
        )
        for (text, _), result in zip(requests, results, strict=True)
    }


@pytest.fixture(scope="module")
def alone():
    """What each request gives by itself, of one worker."""
    answers = {}
    with small_engine.start(executor="uni", logits_processors=[processors.NoThirteen]) as llm:
        for request in REQUESTS:
            answers |= found(llm, [request])
    return answers


def test_each_parameter_does_what_it_says(alone):
    assert re.fullmatch(REGEX, alone["regex"][1][0])
    assert set(alone["choice"][1]) <= set(CHOICES)
    assert len(alone["choice"][1]) == 2
    everything = [token for ids, _, _ in alone.values() for answer in ids for token in answer]
    assert 13 not in everything
    assert 7 not in alone["banned"][0][0]
    assert all(token % 2 for token in alone["words"][0][0])
    assert alone["forced"][0] == [[9] * 16]
    assert set(alone["allowed"][0][0]) == {3, 4, 5}
    (ends,) = alone["ends"][0]
    assert ends.index(5) == len(ends) - 1 == 4
    none, *scores = alone["free"][2]
    assert none is None
    assert len(scores) == len("free") - 1


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"executor": "mp", "tensor_parallel_size": 2}, id="shards"),
        pytest.param({"executor": "uni", "graph_mode": "full_and_piecewise"}, id="graphs"),
        pytest.param(
            {"executor": "mp", "pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.slow
        ),
        pytest.param({"executor": "uni", "prefill_chunk_size": 3}, id="chunks"),
    ],
)
def test_it_is_the_same_in_a_batch(alone, keys):
    with small_engine.start(logits_processors=[processors.NoThirteen], **keys) as llm:
        together = found(llm, REQUESTS)
        with pytest.raises(InvalidRequestError, match="ban must be an id"):
            llm.generate("x", SamplingParams(extra_args={"ban": "7"}))
    for text, (ids, texts, scores) in alone.items():
        assert (together[text][0], together[text][1]) == (ids, texts)
        if scores is not None:
            for row, expected in zip(together[text][2][1:], scores[1:], strict=True):
                assert row.keys() == expected.keys()
                for token, score in expected.items():
                    assert row[token].logprob == pytest.approx(score.logprob, abs=1e-4)


def test_what_leaves_no_token_to_choose_ends_alone(alone):
    """The error says by which parameters; a prompt is scored alike with a warm prefix cache."""
    nothing = SamplingParams(temperature=0, allowed_token_ids=[5], bad_word_ids=[[5, 5]], **MORE)
    with small_engine.start(logits_processors=[processors.NoThirteen]) as llm:
        free = llm.stream("free", dict(REQUESTS)["free"])
        next(free)
        with pytest.raises(
            InvalidRequestError, match=r"after 1 tokens, .*allowed_token_ids, bad_word"
        ):
            llm.generate("x", nothing)
        *_, last = free
        assert last.outputs[0].token_ids == alone["free"][0][0]
        long = "free" * 5
        first, second = (
            llm.generate(long, SamplingParams(temperature=0, prompt_logprobs=2))[0].prompt_logprobs
            for _ in range(2)
        )
        assert first == second
        assert len(second) == len(long)


def test_extra_args_that_nobody_takes_are_refused(alone):
    with (
        small_engine.start(executor="uni") as llm,
        pytest.raises(InvalidRequestError, match="there is no logits processor to take extra_args"),
    ):
        llm.generate("x", SamplingParams(extra_args={"ban": 7}))


class BansAll(LogitsProcessor):
    """Leaves nothing to the requests of one seed."""

    def apply(self, logits, rows):
        for row in range(len(rows.slots)):
            if rows.sampling(row).seed == 13:
                logits[row] = float("-inf")


def test_a_processor_that_leaves_no_token_is_named_and_the_cache_stays():
    long = "free" * 5
    with small_engine.start(executor="uni", logits_processors=[BansAll]) as llm:
        llm.generate(long, SamplingParams(temperature=0, max_tokens=1))
        with pytest.raises(InvalidRequestError, match=r"logits processor BansAll.*leaves none"):
            llm.generate("x", SamplingParams(seed=13))
        (again,) = llm.generate(long, SamplingParams(temperature=0, max_tokens=1))
        assert again.metrics.num_cached_tokens > 0
