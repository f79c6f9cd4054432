"""Configurations of the built-in decoders: what is refused by name, and that nothing else fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES, decoder_config
from hardpoint.checkpoints.decoder_tensors import check_tensors, expected_shapes
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import CheckpointError, UnsupportedModelError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def described(architecture, **config):
    return ModelDescription(
        path=Path("m"),
        format="safetensors",
        architecture=architecture,
        num_layers=3,
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=50,
        context_length=64,
        stored_dtype="float32",
        hf_config={**(EXPERTS if "Moe" in architecture else {}), **config},
    )


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "the activation is 'relu'.* known: silu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "tanh"}, "the activation is 'tanh'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"rope_type": "mrope"}}, "scaling 'mrope' is not kn"),
        ("MistralForCausalLM", {"partial_rotary_factor": 0.5}, "rotated in part"),
        (
            "Gemma2ForCausalLM",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "layer_types is 'chunked_attention'.*sliding_attention",
        ),
    ],
)
def test_what_is_not_supported_is_named(architecture, config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_config(described(architecture, **config))


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9.*at most 4"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["one"]}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "a list of 3 types"),
        ("MistralForCausalLM", {"sliding_window": -4}, "sliding_window is -4"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2"),
        ("LlamaForCausalLM", {"rope_theta": 0.5}, "rope_theta is 0.5"),
    ],
)
def test_what_cannot_be_is_named(architecture, config, message):
    with pytest.raises(CheckpointError, match=message):
        decoder_config(described(architecture, **config))


def test_windows_and_experts_are_where_the_configuration_puts_them():
    def of(architecture, **config):
        return decoder_config(described(architecture, **config)).layers

    assert [each.window for each in of("MistralForCausalLM", sliding_window=7)] == [7, 7, 7]
    assert [each.window for each in of("MistralForCausalLM", sliding_window=None)] == [None] * 3
    assert [each.window for each in of("Qwen2ForCausalLM", sliding_window=7)] == [None] * 3
    late = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}
    assert [each.window for each in of("Qwen2ForCausalLM", **late)] == [None, None, 7]
    assert [each.window for each in of("Gemma2ForCausalLM")] == [4096, None, 4096]
    five = of("Gemma3ForCausalLM", sliding_window_pattern=2)
    assert [(each.window, each.rotary) for each in five] == [(4096, 1), (None, 0), (4096, 1)]
    assert [each.sparse for each in of("Qwen3MoeForCausalLM", decoder_sparse_step=2)] == [
        False, True, False,
    ]  # fmt: skip
    assert [each.sparse for each in of("Qwen3MoeForCausalLM", mlp_only_layers=[0])] == [
        False, True, True,
    ]  # fmt: skip


def test_of_a_great_many_experts_no_more_are_listed_than_there_are_tensors():
    many = described("Qwen3MoeForCausalLM", num_experts=60_000)
    many = evolve(many, num_layers=10_000)
    with pytest.raises(CheckpointError, match="10000 layers, but there are only 1 tensors"):
        check_tensors(many, {"model.norm.weight": (16,)})


KEYS = [
    "hidden_act", "hidden_activation", "rope_theta", "rope_scaling", "rope_parameters",
    "num_experts", "attention_bias", "rope_local_base_freq", "partial_rotary_factor",
    "sliding_window", "layer_types",
    "use_sliding_window", "max_window_layers", "num_experts_per_tok", "moe_intermediate_size",
    "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "query_pre_attn_scalar", "mlp_bias",
    "attn_logit_softcapping", "sliding_window_pattern", "rms_norm_eps", "tie_word_embeddings",
    "original_max_position_embeddings", "max_position_embeddings", "num_local_experts",
]  # fmt: skip
ROPE_KEYS = [
    "rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "mscale", "mscale_all_dim", "attention_factor",
    "original_max_position_embeddings", "truncate", "full_attention", "sliding_attention",
]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["yarn", "llama3", "longrope", "linear", "dynamic", "silu", "default"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=6)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    config=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5),
)
def test_whatever_a_configuration_says_it_is_read_or_refused(architecture, config):
    description = described(architecture, **config)
    try:
        shapes = expected_shapes(evolve(description, num_layers=2))
    except CheckpointError:
        return
    assert all(size > 0 for shape in shapes.values() for size in shape)


def test_older_spellings_of_rotary_rules_are_read():
    def of(architecture, **config):
        return decoder_config(described(architecture, **config)).rotaries

    (linear,) = of("Qwen2ForCausalLM", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert (linear.kind, linear.theta, linear.factor) == ("linear", 5e5, 2.0)
    long = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    (su,) = of("Phi3ForCausalLM", rope_scaling=long, original_max_position_embeddings=32)
    assert (su.kind, su.original_length, su.factor) == ("longrope", 32, 2.0)
    everywhere, local = of("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8})
    assert (everywhere.kind, everywhere.theta, everywhere.factor) == ("linear", 1e6, 8.0)
    assert (local.kind, local.theta) == ("default", 1e4)
