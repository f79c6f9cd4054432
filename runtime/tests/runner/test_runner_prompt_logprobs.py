"""Log-probabilities of prompts: equal to the reference's however the prompt is cut, preempted or
mixed with others.
"""

from __future__ import annotations

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.errors import HardpointError
from hardpoint.sampling_params import SamplingParams

LONG = [(3 + 7 * place) % 97 for place in range(70)]
PROMPTS = {"long": LONG, "short": LONG[:2], "one": [5], "silent": LONG[:30]}
COUNTS = {"long": 3, "short": 0, "one": 2, "silent": None}


@pytest.fixture(scope="module")
def reference(folder):
    """Prompt name -> log-probabilities [prompt length - 1, V] of what follows each token."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return {
            name: model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            for name, prompt in PROMPTS.items()
        }


def params(name, **more):
    return SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=COUNTS[name], **more)


def check(scores, name, reference):
    """[prompt length - 1, k + 1]: the token that came, then the best."""
    expected, prompt, count = reference[name], PROMPTS[name], COUNTS[name]
    assert [len(row) for row in scores.values] == [count + 1] * (len(prompt) - 1)
    for place, (ids, values, rank) in enumerate(
        zip(scores.ids, scores.values, scores.ranks, strict=True)
    ):
        row = expected[place]
        assert ids[0] == prompt[place + 1]
        assert list(ids[1:]) == row.sort(descending=True, stable=True).indices[:count].tolist()
        assert values == pytest.approx(row[list(ids)].tolist(), abs=1e-4)
        assert rank == tuple(int((row >= row[token]).sum()) for token in ids)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_equal_to_the_reference_in_chunks(folder, reference, make_runner, make_driver, chunk):
    """Each arrives once, with the first token; fewer rows of logits at a time change nothing."""
    runner = make_runner(description=read_description(str(folder)), max_num_batched_tokens=256)
    driver = make_driver(runner)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, params(name))
    arrived = {}
    while any(not driver.output(name) for name in PROMPTS):
        busy = [name for name in PROMPTS if len(driver.output(name)) < 2]
        output = driver.step({name: min(driver.left(name), chunk) for name in busy})
        for name, scores in output.prompt_logprobs.items():
            assert name not in arrived
            assert len(driver.output(name)) == 1
            arrived[name] = scores
    assert set(arrived) == {"long", "short", "one"}
    assert arrived["one"].ids == ()
    for name in ("long", "short"):
        check(arrived[name], name, reference)


def test_a_prompt_that_loses_its_blocks_is_scored_again_and_told_once(
    folder, reference, make_runner, make_driver
):
    driver = make_driver(make_runner(description=read_description(str(folder))))
    driver.add("long", LONG, params("long"))
    driver.step({"long": 40})
    driver.preempt("long")
    driver.step({"long": 33})
    output = driver.step({"long": 37})
    check(output.prompt_logprobs["long"], "long", reference)
    driver.preempt("long")
    output = driver.step({"long": driver.left("long")})
    assert output.tokens == ((driver.output("long")[-1],),)
    assert output.prompt_logprobs == {}


def test_the_whole_vocabulary(folder, reference, make_runner, make_driver):
    driver = make_driver(make_runner(description=read_description(str(folder))))
    sampling = SamplingParams(temperature=0, prompt_logprobs=-1)
    driver.add("short", PROMPTS["silent"], sampling)
    output = driver.step({"short": 30})
    scores = output.prompt_logprobs["short"]
    for row, expected in enumerate(reference["silent"]):
        by_id = dict(zip(scores.ids[row], scores.values[row], strict=True))
        ours = torch.tensor([by_id[token] for token in range(97)])
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_from_graphs(folder, reference, make_graphs, make_driver, mode):
    runner = make_graphs(mode, description=read_description(str(folder)))
    driver = make_driver(runner)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, params(name))
    arrived, modes = {}, set()
    while any(not driver.output(name) for name in PROMPTS):
        busy = [name for name in PROMPTS if not driver.output(name)]
        output = driver.step({name: min(driver.left(name), 6) for name in busy})
        arrived |= output.prompt_logprobs
        modes.add(output.graph_stats.mode)
    assert mode.upper() in modes
    check(arrived["long"], "long", reference)
    check(arrived["short"], "short", reference)


def test_rows_of_logits_are_few_at_a_time(folder, make_runner, make_driver, monkeypatch):
    runner = make_runner(description=read_description(str(folder)), max_num_seqs=2)
    sizes = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden)
    )
    driver = make_driver(runner)
    driver.add("long", LONG[:60], params("long"))
    driver.step({"long": 60})
    assert sizes == [16, 16, 16, 11, 1]


def test_a_request_that_skips_its_prompt_cannot_have_it_scored(make_runner, make_driver):
    driver = make_driver(make_runner())
    driver.add("long", LONG, params("long"))
    driver.computed["long"] = 4
    with pytest.raises(HardpointError, match=r"request 'long' asks for prompt_logprobs .* 4"):
        driver.step({"long": 10})
