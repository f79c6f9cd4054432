"""What a native program does not do runs through torch, and each reason is said, once."""

from __future__ import annotations

import logging

import pytest
import torch
from attrs import evolve
from hardpoint.logits_processor import LogitsProcessor
from hardpoint_cpu.native import library
from hardpoint_cpu.native.refusals import MOST_GROUP, refusal
from hardpoint_engine import PoolingParams, SamplingParams
from hardpoint_runtime.models.decoder_layers import DecoderMLP
from native_models import PROMPTS, engine

available = library.availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason or "")

KEYS = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


class Twice(LogitsProcessor):
    """Changes logits."""

    def apply(self, logits, rows):
        logits.mul_(2)


class Refining(Twice):
    """Changes logits of rows that draw."""

    argmax_invariant = True


def said(caplog) -> list[str]:
    """What was said of torch's way, as warnings."""
    return [
        each.message
        for each in caplog.records
        if "through torch instead" in each.message and each.levelno == logging.WARNING
    ]


DRAWN = {"temperature": 0.8, "seed": 3}
STEPS = {
    "scores of prompts are asked for": ({}, {"prompt_logprobs": 1}),
    "logits processors are applied": ({"logits_processors": (Twice,)}, {}),
    "logits processors are applied, ": ({"logits_processors": (Refining,)}, DRAWN),
    "a grammar is followed": ({}, {"structured_outputs": {"regex": "[w0-9]+"}}),
    "only some tokens are allowed": ({}, {"allowed_token_ids": (5, 7, 9)}),
    "log-probabilities of changed logits are wanted": (
        {"logprobs_mode": "processed_logprobs"}, {"logprobs": 2, "logit_bias": {5: 1.0}},
    ),
}  # fmt: skip
"""What is said -> keys of a run and of a request."""
NATIVE = {
    "the best": {},
    "draws": {**DRAWN, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "biases": {"logit_bias": {5: 2.0}, "min_tokens": 2, "bad_words": ("w9",)},
    "log-probabilities": {"logprobs": 3},
}
"""Of these nothing is said: nothing of them goes through torch."""


@pytest.mark.parametrize("reason", STEPS)
def test_what_of_a_step_goes_through_torch_is_said_once(checkpoint, caplog, reason):
    run, request = STEPS[reason]
    with engine(checkpoint("llama"), "on", **run) as llm:
        for _ in range(2):
            llm.generate(PROMPTS[:3], SamplingParams(**{**KEYS, **request}))
    (message,) = said(caplog)
    assert message.endswith(f", where {reason.rstrip(', ')}")


def test_vectors_are_said_and_what_is_native_is_not(checkpoint, caplog):
    with engine(checkpoint("llama"), "on") as llm:
        for request in NATIVE.values():
            llm.generate(PROMPTS[:3], SamplingParams(**{**KEYS, **request}))
        assert said(caplog) == []
        for _ in range(2):
            llm.embed(PROMPTS[:2], PoolingParams())
    (message,) = said(caplog)
    assert message.endswith("some steps, where vectors are asked for")


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_say_it_once(checkpoint, capfd, ranks):
    with engine(checkpoint("llama"), "on", executor="mp", **{ranks: 2}) as llm:
        asked = SamplingParams(**KEYS, prompt_logprobs=1, allowed_token_ids=(5, 7, 9))
        llm.generate(PROMPTS[:2], asked)
    err = capfd.readouterr().err
    assert err.count("scores of prompts are asked for") == 1, err
    assert err.count("only some tokens are allowed") == 1, err


class OtherMLP(DecoderMLP):
    """Another class of module."""


def another_class(runner, patch):
    patch.setattr(runner.model.layers[1].mlp, "__class__", OtherMLP)


def another_forward(runner, patch):
    patch.setitem(vars(runner.model.layers[1].mlp), "forward", lambda x: x)


def another_type(runner, patch):
    norm = runner.model.layers[0].input_norm
    patch.setattr(norm.weight, "data", norm.weight.data.to(torch.float16))


def in_pieces(runner, patch):
    projection = runner.model.layers[0].attention.qkv
    patch.setattr(projection.weight, "data", projection.weight.data.t().contiguous().t())


def another_activation(runner, patch):
    patch.setattr(runner.model, "config", evolve(runner.model.config, activation="relu"))


def many_heads(runner, patch):
    model = runner.model
    heads = model.description.num_kv_heads * (MOST_GROUP + 1)
    patch.setattr(model, "description", evolve(model.description, num_heads=heads))


def another_operation(runner, patch):
    patch.setattr(runner, "operations", evolve(runner.operations, rotary=lambda x, c, s: x))


def other_caches(runner, patch):
    specs = dict(runner.get_kv_cache_spec())
    last = next(reversed(specs))
    specs[last] = evolve(specs[last], num_kv_heads=1)
    patch.setattr(runner, "get_kv_cache_spec", lambda: specs)


def graphs(**keys):
    def change(runner, patch):
        graph = evolve(runner.config.graph, **keys)
        patch.setattr(runner, "config", evolve(runner.config, graph=graph))

    return change


MODELS = {
    "layers.1.mlp is a OtherMLP, which is not lowered yet": another_class,
    "the forward method of layers.1.mlp was replaced": another_forward,
    "layers.0.input_norm.weight is torch.float16, or not in one piece": another_type,
    "layers.0.attention.qkv.weight is torch.float32, or not in one piece": in_pieces,
    "activation relu is not lowered yet": another_activation,
    f"more than {MOST_GROUP} query heads share a key head": many_heads,
    "operation rotary is a plugin's": another_operation,
    "its layers keep keys and values in different ways": other_caches,
    "graph_mode = 'none', so that no step replays anything": graphs(graph_mode="none"),
    "graph_sizes is set, and a program is for steps of any size": graphs(graph_sizes=(1, 2)),
    "graph_policy = 'x' chooses among recorded graphs": graphs(graph_policy="x"),
}


def test_every_reason_against_a_model_has_its_words(checkpoint):
    """That what :func:`refusal` says is logged, see test_native_graphs.py and others."""

    def refused(worker):
        runner, found = worker.model_runner, {}
        assert refusal(runner) is None
        for reason, change in MODELS.items():
            with pytest.MonkeyPatch.context() as patch:
                change(runner, patch)
                found[reason] = refusal(runner)
        assert refusal(runner) is None
        return found

    with engine(checkpoint("llama"), "on") as llm:
        (found,) = llm.collective_rpc(refused)
    assert found == {reason: reason for reason in MODELS}
