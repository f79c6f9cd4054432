"""The runner puts a checkpoint's weights into the built-in model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from hardpoint.errors import CheckpointError
from hardpoint_runtime.loading import load_into
from hardpoint_runtime.loading.random import RandomWeights
from hardpoint_runtime.operations import Operations


@pytest.fixture
def tied(make_runner):
    runner = make_runner()
    weights = RandomWeights(runner.description, 3)
    return runner, weights


def bring(runner, weights, *names):
    more = dict.fromkeys(names, (97, 32))
    held = SimpleNamespace(shapes={**weights.shapes, **more}, iterate=weights.iterate)
    return load_into(runner.make_model(Operations()), held, torch.float32)


def test_a_tied_model_may_get_an_output_projection_and_frequencies(tied):
    runner, weights = tied
    plain = bring(runner, weights)
    more = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert bring(runner, weights, *more) == plain > 0


def test_an_untied_model_needs_its_output_projection(tied):
    runner, weights = tied
    config = {**runner.description.hf_config, "tie_word_embeddings": False}
    runner.description = evolve(runner.description, hf_config=config)
    with pytest.raises(CheckpointError, match=r"1 weights of the model are missing: .*lm_head"):
        bring(runner, weights)


def test_other_weights_have_no_place(tied):
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.weight"):
        bring(*tied, "model.layers.9.mlp.weight")


def test_weights_are_a_function_of_the_seed(make_runner):
    first, second = make_runner(), make_runner()
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)
