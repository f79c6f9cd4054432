"""Every built-in architecture beside transformers, from a checkpoint on disk to tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hardpoint.checkpoints import read_description

_spec = importlib.util.spec_from_file_location(
    "tiny_architectures", Path(__file__).with_name("tiny_architectures.py")
)
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

EVERY = {**tiny.ROWS, **tiny.FOREIGN}
LENGTH = 24
LONGEST = {"phi3-short": 96}
"""max_model_len where it decides how positions are turned; None: as long as the model's context."""
PROMPTS = {f"r{n}": [(7 * i * i + 3 * i + n) % 94 + 3 for i in range(n)] for n in (1, 5, 12, 33)}
NEAR = 1e-3
"""Two best logits nearer than this are a tie: what follows is not compared."""


class Reference:
    """A checkpoint, and what transformers makes of PROMPTS."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        _, model_class = tiny.classes(EVERY[name][0])
        model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokens, self.logits, self.clear = {}, {}, {}
        if name == "phi3-long":  # transformers takes the short factors for a short text
            model.config.rope_parameters["short_factor"] = tiny.LONG["long_factor"]
            model = model_class(model.config).eval()
            model.load_state_dict(model_class.from_pretrained(folder).state_dict())
        for req_id, prompt in PROMPTS.items():
            tokens = torch.tensor([prompt])
            with torch.inference_mode():
                for _ in range(LENGTH):
                    logits = model(tokens).logits[0, -1:]
                    tokens = torch.cat((tokens, logits.argmax(-1)[None]), 1)
                logits = model(tokens).logits[0]
            self.tokens[req_id] = tokens[0, len(prompt) :].tolist()
            self.logits[req_id] = logits[len(prompt) - 1 : -1]
            best = self.logits[req_id].topk(2).values
            near = (best[:, 0] - best[:, 1] < NEAR).nonzero()
            self.clear[req_id] = int(near[0, 0]) if len(near) else LENGTH

    def check(self, found):
        for req_id, tokens in found.items():
            clear = self.clear[req_id]
            assert tokens[:clear] == self.tokens[req_id][:clear], req_id
        assert sum(self.clear.values()) > LENGTH * len(PROMPTS) * 0.9, "ties all over"


_made: dict[str, Reference] = {}


@pytest.fixture(scope="module")
def make_reference(tmp_path_factory):
    def make(name):
        if name not in _made:
            folder = tiny.save(name, tmp_path_factory.mktemp(name))
            _made[name] = Reference(name, folder)
        return _made[name]

    yield make
    _made.clear()


def started(make_runner, reference, **more):
    return make_runner(
        description=read_description(str(reference.folder)),
        max_model_len=LONGEST.get(reference.name),
        **more,
    )


@pytest.mark.parametrize("name", EVERY)
def test_logits_and_greedy_tokens_equal_transformers(
    make_reference, make_runner, make_driver, name
):
    """All prompts in one batch, then each alone in chunks of 7: one runner, no cache kept."""
    reference = make_reference(name)
    runner = started(make_runner, reference)
    logits = []
    compute = runner.model.compute_logits
    runner.model.compute_logits = lambda hidden: logits.append(compute(hidden)) or logits[-1]
    driver = make_driver(runner)
    for req_id, prompt in PROMPTS.items():
        driver.add(req_id, prompt)
    found = driver.run(LENGTH)
    reference.check(found)
    rows = torch.stack(logits)  # steps, requests: the order of the batch is by length
    for place, req_id in enumerate(_batch_order(runner)):
        ours, clear = rows[:, place].cpu(), reference.clear[req_id]
        assert (ours - reference.logits[req_id])[:clear].abs().max() < 1e-3
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)


def _batch_order(runner):
    return runner.requests.ids


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2"])
def test_bfloat16_logits_stay_near_those_of_float32(make_runner, make_driver, tmp_path, name):
    """Weights whose norms have one added keep their digits."""
    tiny.save(name, tmp_path, initializer_range=0.05)
    _, model_class = tiny.classes(EVERY[name][0])
    model = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = PROMPTS["r33"]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    runner = make_runner(description=read_description(str(tmp_path)), dtype="bfloat16")
    found = []
    compute = runner.model.compute_logits
    runner.model.compute_logits = lambda hidden: found.append(compute(hidden)) or found[-1]
    driver = make_driver(runner)
    driver.add("a", tokens)
    driver.step({"a": len(tokens)})
    assert found[0].dtype == torch.float32
    assert (found[0][0].cpu() - expected).abs().max() < 5e-2
    assert expected.abs().max() > 0.3


@pytest.mark.parametrize("name", EVERY)
def test_the_same_tokens_however_they_are_computed(make_reference, make_runner, make_driver, name):
    """Alone, in chunks of 1, 7 and 64, preempted, and behind a prefix that is in the cache."""
    reference = make_reference(name)
    runner = started(make_runner, reference)
    driver = make_driver(runner)
    for req_id, prompt in PROMPTS.items():
        driver.add(req_id, prompt)
        reference.check(driver.run(LENGTH))
        driver.finish(req_id)
    for chunk in (1, 7, 64):
        for req_id, prompt in PROMPTS.items():
            driver.add(f"{req_id}", prompt)
        for round_ in range(LENGTH):
            driver.run(round_ + 1, chunk=chunk)
            if round_ % 9 == 4:
                driver.preempt(list(PROMPTS)[round_ % len(PROMPTS)])
        reference.check({req_id: driver.output(req_id) for req_id in PROMPTS})
        for req_id in PROMPTS:
            driver.finish(req_id)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3-moe", "phi3-short", "olmo2"])
def test_behind_a_prefix_that_is_in_the_cache(make_reference, make_runner, make_driver, name):
    class Sharing(make_driver):
        def _grow(self, req_id, end):
            fresh = super()._grow(req_id, end)
            return fresh if req_id in self.known else list(self.blocks[req_id])

    reference = make_reference(name)
    driver = Sharing(started(make_runner, reference))
    driver.add("first", PROMPTS["r33"])
    driver.run(1)
    driver.add("r33", PROMPTS["r33"])
    driver.computed["r33"], driver.blocks["r33"] = 32, driver.blocks["first"][:8]
    reference.check({"r33": driver.run(LENGTH)["r33"]})


@pytest.mark.parametrize(
    "name", ["mistral", "phi3-short", "gemma2", "gemma3", "qwen3-moe", "gpt-neox"]
)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_through_graphs(make_reference, make_graphs, make_driver, name, mode):
    reference = make_reference(name)
    runner = make_graphs(
        mode,
        description=read_description(str(reference.folder)),
        max_model_len=LONGEST.get(name),
        sizes=[1, 4, 8],
    )
    driver = make_driver(runner)
    for req_id, prompt in PROMPTS.items():
        driver.add(req_id, prompt)
    reference.check(driver.run(LENGTH, chunk=6))
    assert runner.graphs is not None
