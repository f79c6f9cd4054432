"""What becomes of an architecture that is not built in; that it computes the same, the runner's
tests of architectures show.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import CheckpointError, UnsupportedError, UnsupportedModelError
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.models import build_model
from hardpoint_runtime.models.foreign import ForeignModel
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.groups import Topology
from hardpoint_runtime.parallel.seat import ALONE, Seat

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def description(architecture, model_type, **more):
    return ModelDescription(
        path=Path("tiny"),
        format="safetensors",
        architecture=architecture,
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=97,
        context_length=64,
        stored_dtype="float32",
        hf_config={**SIZES, "model_type": model_type, **more},
    )


OLMO = description("Olmo2ForCausalLM", "olmo2")


def build(described, seat=ALONE):
    return build_model(described, Operations(), HostDeviceOps(), torch.float32, seat=seat)


def test_it_is_said_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="hardpoint.models"):
        model = build(OLMO)
    assert isinstance(model, ForeignModel)
    assert (
        "architecture Olmo2ForCausalLM is not native: transformers' modelling code is used, slower"
        in caplog.text
    )


def test_layers_keep_what_they_were_seen_to_write():
    specs = build(OLMO).kv_cache_spec(16, "float32")
    assert list(specs) == ["layers.0.attention", "layers.1.attention"]
    assert {(s.num_kv_heads, s.head_size_k, s.head_size_v) for s in specs.values()} == {(2, 8, 8)}


def test_building_draws_nothing_and_leaves_nothing_on_the_meta_device():
    before = torch.get_rng_state()
    model = build(OLMO)
    assert torch.equal(torch.get_rng_state(), before)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_a_tied_projection_is_one_weight_and_may_be_in_the_file():
    model = build(description("CohereForCausalLM", "cohere", tie_word_embeddings=True))
    assert "lm_head.weight" not in model.weight_shapes()
    assert model.is_ignorable("lm_head.weight")
    assert model.whole.lm_head.weight is model.body.embed_tokens.weight
    untied = build(OLMO)
    assert "lm_head.weight" in untied.weight_shapes()
    assert not untied.is_ignorable("lm_head.weight")


def test_a_checkpoint_keeps_its_own_names():
    neox = build(description("GPTNeoXForCausalLM", "gpt_neox"))
    assert "embed_out.weight" in neox.weight_shapes()
    assert neox.is_ignorable("gpt_neox.layers.0.attention.masked_bias")


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "reason"),
    [
        ("AcmeForCausalLM", "acme", {}, "no language model AcmeForCausalLM of model_type 'acme'"),
        ("Olmo2ForCausalLM", "olmo", {}, "no language model Olmo2ForCausalLM of model_type 'olmo'"),
        ("T5ForConditionalGeneration", "t5", {}, "no language model T5ForConditionalGeneration"),
        ("BartForCausalLM", "bart", {}, "cross attention"),
        ("MambaForCausalLM", "mamba", {}, "it has layers of linear_attention"),
        ("FalconForCausalLM", "falcon", {}, "it does not attend through an attention function"),
        ("RecurrentGemmaForCausalLM", "recurrent_gemma", {}, "layers of linear_attention"),
        (
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {},
            r"(?s)not understood.*mamba_n_heads",
        ),
        (
            "Olmo2ForCausalLM",
            "olmo2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the longest text of a batch",
        ),
        ("Olmo2ForCausalLM", "olmo2", {"hidden_act": "nonsense"}, "it cannot be built.*nonsense"),
        ("OlmoeForCausalLM", "olmoe", {}, "it does more than tensors tell"),
    ],
)
def test_what_is_more_than_attention_is_refused_by_name(architecture, model_type, changes, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        build(description(architecture, model_type, **changes))
    assert architecture in str(caught.value)
    assert "supported are" in str(caught.value)


def test_without_transformers_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UnsupportedModelError, match=r"pip install 'hardpoint-runtime\[transformers\]'"
    ):
        build(OLMO)


def test_it_is_only_ever_whole():
    with pytest.raises(UnsupportedError, match="does not support several ranks"):
        build(OLMO, Seat(topology=Topology(tensor=2), rank=0))


def test_another_number_of_layers_than_described_is_seen():
    with pytest.raises(UnsupportedModelError, match="2 of its 3 layers attend"):
        build(evolve(OLMO, num_layers=3))


def test_a_configuration_that_its_files_belie_allocates_nothing(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3000))
    small = evolve(OLMO, path=tmp_path)
    with pytest.raises(CheckpointError, match=r"28\d{3} elements, more than the 3000 bytes"):
        build(evolve(small, hf_config={**small.hf_config, "vocab_size": 200}))
    assert isinstance(build(evolve(small, hf_config={**small.hf_config})), ForeignModel)


def test_a_number_of_modules_that_nobody_has_is_refused_before_any_is_made():
    config = {**OLMO.hf_config, "num_hidden_layers": 1 << 30}
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1073741824, more than 65536"):
        build(evolve(OLMO, hf_config=config))
