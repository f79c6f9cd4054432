"""Vectors through a whole engine: in order, beside answers, and never from a cached beginning."""

from __future__ import annotations

import pytest
from hardpoint.errors import InvalidRequestError, UnsupportedError
from hardpoint_engine import LLM, PoolingParams, SamplingParams

KEYS = {"platform": "dummy", "load_format": "dummy", "max_model_len": 256}
SHORT = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def llm():
    with LLM(**KEYS) as llm:
        yield llm


def test_each_prompt_has_a_vector_and_no_token(llm):
    prompts = ["one", "two", [116, 119, 111]]
    first, second, third = llm.embed(prompts)
    assert len(first.embedding) == 4  # of the dummy model
    assert first.embedding != second.embedding
    assert second.embedding == third.embedding
    assert (second.prompt, third.prompt) == ("two", None)
    assert third.prompt_token_ids == [116, 119, 111]
    assert llm.metrics.generated_tokens == 0
    assert first.metrics.num_generation_tokens == 0
    assert llm.metrics.finished == {"stop": 3}
    assert llm.embed("two")[0].embedding == second.embedding
    assert not llm.core.has_unfinished()


@pytest.mark.parametrize(("kind", "cached"), [("mean", False), ("cls", False), ("last", True)])
def test_cached_beginnings_are_used_where_only_the_last_state_counts(llm, kind, cached):
    prompt = "x" * 100
    llm.generate(prompt, SHORT)
    (result,) = llm.embed(prompt, PoolingParams(kind))
    assert (result.metrics.num_cached_tokens > 0) == cached
    (answer,) = llm.generate(prompt, SHORT)  # and what it computed is found again
    assert answer.metrics.num_cached_tokens == 96


def test_chunks_and_a_small_cache_change_nothing():
    prompts = ["x" * 100, "y" * 90, "z" * 80]
    with LLM(**KEYS) as llm:
        expected = [result.embedding for result in llm.embed(prompts)]
    with LLM(**KEYS, max_num_batched_tokens=48, num_kv_blocks=17) as llm:
        answers = llm.stream("w" * 100, SamplingParams(temperature=0, max_tokens=100))
        assert [result.embedding for result in llm.embed(prompts)] == expected
        answers.close()


def test_what_cannot_be_had_is_named(llm, monkeypatch):
    with pytest.raises(InvalidRequestError, match="one of mean, last, cls, not 'max'"):
        llm.embed("a", "max")
    with pytest.raises(InvalidRequestError, match="prompt 2 of 2"):
        llm.embed(["a", ""])
    monkeypatch.setattr(llm.executor, "_tasks", ("generate",))
    with pytest.raises(UnsupportedError, match="embed"):
        llm.embed("a")
