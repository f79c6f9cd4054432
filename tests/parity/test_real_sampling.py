"""The default model: words that may not come, scores of prompts, forms of answers."""

from __future__ import annotations

import json
import re

import pytest
from hardpoint_engine import LLM, SamplingParams

pytestmark = pytest.mark.slow
TEXTS = [
    "The capital of France is",
    "The river Rhine is one of the longest",
    "Once upon a time the king of",
    "The sum of the numbers is",
    "In the middle of the night",
    "The most famous of the planets is",
    "The history of the city of Paris is",
    "What is the meaning of",
]
WORDS = ("the", "is", "of", "Paris", "fibonacci")


@pytest.fixture(scope="module")
def llm(model_path):
    keys = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 400, "seed": 1}
    with LLM(str(model_path), platform="cpu", prefill_chunk_size=7, **keys) as llm:
        yield llm


def test_a_bad_word_never_appears(llm):
    """64 tokens after each of 8 prompts, whose answers would be full of these words."""
    free = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    barred = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, bad_words=WORDS)
    before = llm.generate(TEXTS, free)
    after = llm.generate(TEXTS, barred)
    said = " ".join(result.outputs[0].text for result in before)
    assert all(re.search(rf"\b{word}\b", said) for word in WORDS[:3])
    for result in after:
        ids = list(result.outputs[0].token_ids)
        assert len(ids) == 64
        for word in WORDS:
            for spelt in (word, " " + word):
                bad = list(llm.tokenizer.encode(spelt, add_special_tokens=False))
                assert all(ids[at : at + len(bad)] != bad for at in range(64)), spelt


def test_scores_of_prompts_are_the_reference_s(llm, reference, prompt_ids):
    import torch

    results = llm.generate(
        prompt_ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    )
    for ids, result in zip(prompt_ids, results, strict=True):
        with torch.no_grad():
            expected = reference[0](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        none, *scores = result.prompt_logprobs
        assert none is None
        assert len(scores) == len(ids) - 1
        for row, actual, score in zip(expected, ids[1:], scores, strict=True):
            assert actual in score
            for token, each in score.items():
                assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_answers_have_their_form(llm):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["kind", "old", "tall"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    question = [{"role": "user", "content": "Describe a person as JSON."}]
    wish = SamplingParams(
        temperature=1.0, seed=3, n=4, max_tokens=120, structured_outputs={"json": schema}
    )
    for answer in llm.chat(question, wish)[0].outputs:
        value = json.loads(answer.text)
        assert list(value) == ["name", "age", "tags"]
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 130
        assert set(value["tags"]) <= {"kind", "old", "tall"}
