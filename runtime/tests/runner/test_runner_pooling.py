"""Prompts as vectors, beside transformers' final hidden states, in chunks and beside others."""

from __future__ import annotations

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

LENGTHS = {"a": 1, "b": 7, "c": 20, "d": 33}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(1)
    return {name: torch.randint(0, 97, (length,)).tolist() for name, length in LENGTHS.items()}


@pytest.fixture(scope="module")
def states(folder, prompts):
    """Each prompt's final hidden states [length, H]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return {
            name: model(torch.tensor([ids])).last_hidden_state[0] for name, ids in prompts.items()
        }


POOLED = {
    "mean": lambda states: states.mean(0),
    "last": lambda states: states[-1],
    "cls": lambda states: states[0],
}


@pytest.fixture
def driver(folder, make_runner, make_driver):
    made = make_driver(make_runner(description=read_description(str(folder))))
    made.pooled = {}
    take = made.take

    def taking(plan, output):
        take(plan, output)
        assert not made.pooled.keys() & output.pooled.keys(), "a vector comes once"
        made.pooled |= output.pooled
        for req_id, tokens in zip(output.req_ids, output.tokens, strict=True):
            assert not (made.pooling.get(req_id) and tokens)

    made.take = taking
    return made


def run(driver, chunk: int) -> None:
    """Compute all prompts, up to ``chunk`` tokens of each a step."""
    while busy := [req_id for req_id in driver.tokens if driver.left(req_id)]:
        before = dict(driver.pooled)
        driver.step({req_id: min(driver.left(req_id), chunk) for req_id in busy})
        for req_id in driver.pooled.keys() - before.keys():
            assert not driver.left(req_id), "before its prompt was complete"


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kind", POOLED)
def test_vectors_are_those_of_transformers(driver, prompts, states, kind, chunk):
    for name, ids in prompts.items():
        driver.add(name, ids, pooling=PoolingParams(kind))
    run(driver, chunk)
    assert driver.pooled.keys() == prompts.keys()
    for name in prompts:
        expected = POOLED[kind](states[name])
        torch.testing.assert_close(
            torch.tensor(driver.pooled[name]), expected, atol=1e-4, rtol=1e-4
        )


def test_a_vector_may_have_the_length_one(driver, prompts, states):
    driver.add("c", prompts["c"], pooling=PoolingParams("mean", normalize=True))
    run(driver, 64)
    expected = torch.nn.functional.normalize(states["c"].mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(driver.pooled["c"]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", POOLED)
def test_a_preempted_prompt_is_gathered_once(driver, prompts, states, kind):
    driver.add("d", prompts["d"], pooling=PoolingParams(kind))
    driver.step({"d": 20})
    driver.preempt("d")
    driver.step({})
    run(driver, 7)
    expected = POOLED[kind](states["d"])
    torch.testing.assert_close(torch.tensor(driver.pooled["d"]), expected, atol=1e-4, rtol=1e-4)


def test_neighbours_generate_and_have_their_prompts_scored(driver, prompts):
    """In one step: a vector, a token, and scores of a prompt, each as alone."""
    scored = SamplingParams(temperature=0, prompt_logprobs=1)
    alone = {}
    for name, sampling in (("b", GREEDY), ("c", scored)):
        driver.add(name, prompts[name], sampling)
        alone[name] = driver.step({name: len(prompts[name])})
        driver.finish(name)
    driver.add("b", prompts["b"], GREEDY)
    driver.add("a", prompts["a"], pooling=PoolingParams())
    driver.add("c", prompts["c"], scored)
    driver.add("d", prompts["d"], pooling=PoolingParams())
    output = driver.step({name: len(prompts[name]) for name in "bacd"})
    tokens = dict(zip(output.req_ids, output.tokens, strict=True))
    assert {name for name, found in tokens.items() if found} == {"b", "c"}
    assert tokens["b"] == alone["b"].tokens[0]
    assert tokens["c"] == alone["c"].tokens[0]
    assert output.prompt_logprobs["c"].ids == alone["c"].prompt_logprobs["c"].ids
    assert set(output.pooled) == {"a", "d"}
    for name in "abcd":
        driver.finish(name)
    driver.step({})
    assert not driver.runner.requests.pooling


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", POOLED)
def test_a_vector_that_is_no_number_is_counted_and_not_given(driver, kind, normalize):
    """One token's embedding is lost: a prompt with it has no vector, and nobody else notices."""
    params = PoolingParams(kind, normalize=normalize)
    driver.add("good", [1, 2, 3], pooling=params)
    alone = driver.step({"good": 3}).pooled["good"]
    driver.finish("good")
    driver.pooled.clear()
    embeddings = [p for p in driver.runner.get_model().parameters() if p.shape == (97, 32)]
    with torch.no_grad():
        embeddings[0][50] = torch.nan
    driver.add("good", [1, 2, 3], pooling=params)
    driver.add("bad", [50] * 3, pooling=params)
    output = driver.step({"good": 3, "bad": 3})
    assert output.nan_counts == {"bad": 32}
    assert output.pooled.keys() == {"good"}
    torch.testing.assert_close(torch.tensor(output.pooled["good"]), torch.tensor(alone))
