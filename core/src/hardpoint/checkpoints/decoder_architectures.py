"""The architectures that are built in, each as a function from its configuration to a decoder.

Keys and defaults are those of Hugging Face configurations of that architecture. Whatever a function
does not read, it does not have: it refuses what would change the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from hardpoint.checkpoints.decoder import DecoderConfig, ExpertsConfig
from hardpoint.checkpoints.decoder_keys import (
    FULL,
    SLIDING,
    cap,
    checked,
    decoder,
    fields_of,
    layer_types,
    some_windows,
    unsupported,
    windowed,
    windows_of,
)
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.rotary import read_rotary

Reader = Callable[[ModelDescription], DecoderConfig]


def decoder_config(description: ModelDescription) -> DecoderConfig | None:
    """Return what the described model is built from; None if its architecture is not built in.

    Raises CheckpointError for a value that cannot be, UnsupportedModelError, naming the key, for
    one that is not supported.
    """
    reader = ARCHITECTURES.get(description.architecture)
    return None if reader is None else reader(description)


def llama(description: ModelDescription) -> DecoderConfig:
    """Llama 2 and 3, SmolLM and whatever calls itself one."""
    fields = fields_of(description)
    bias = fields.flag("attention_bias", False)
    return decoder(
        description,
        fields,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(description: ModelDescription) -> DecoderConfig:
    """Mistral: every layer sees a window, if the configuration has one."""
    return decoder(description, fields_of(description), windows=windowed(description))


def qwen2(description: ModelDescription) -> DecoderConfig:
    """Qwen 2 and 2.5: queries, keys and values have biases."""
    return decoder(
        description, fields_of(description), qkv_bias=True, windows=some_windows(description)
    )


def qwen3(description: ModelDescription, **more: Any) -> DecoderConfig:
    """Qwen 3: the heads of queries and keys are normalised."""
    fields = fields_of(description)
    bias = fields.flag("attention_bias", False)
    return decoder(
        description,
        fields,
        query_key_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=some_windows(description),
        **more,
    )


def qwen2_moe(description: ModelDescription) -> DecoderConfig:
    """Qwen 2 with experts in some layers, one of them for every token."""
    fields = fields_of(description)
    shared = fields.integer("shared_expert_intermediate_size", high=1 << 24)
    return decoder(
        description,
        fields,
        qkv_bias=fields.flag("qkv_bias", True),
        windows=some_windows(description),
        **_some_experts(description, fields, shared),
    )


def qwen3_moe(description: ModelDescription) -> DecoderConfig:
    """Qwen 3 with experts in some layers."""
    return qwen3(description, **_some_experts(description, fields_of(description)))


def _some_experts(
    description: ModelDescription, fields: Fields, shared: int | None = None
) -> dict[str, Any]:
    dense = fields.values.get("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise fields.fail("mlp_only_layers", dense, "a list of layers")
    sparse = [
        index not in dense and (index + 1) % step == 0 for index in range(description.num_layers)
    ]
    count = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    experts = ExpertsConfig(
        count=fields.integer(count, high=1 << 16),
        per_token=fields.integer("num_experts_per_tok", high=1 << 16),
        size=fields.integer("moe_intermediate_size", high=1 << 24),
        normalised=fields.flag("norm_topk_prob", False),
        shared=shared,
    )
    return {"experts": checked(fields, experts), "sparse": sparse}


def mixtral(description: ModelDescription) -> DecoderConfig:
    """Mixtral: a Mistral whose every MLP is a mixture of experts."""
    fields = fields_of(description)
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 8, high=1 << 16),
        per_token=fields.integer("num_experts_per_tok", 2, high=1 << 16),
        size=description.intermediate_size,
        normalised=True,
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return decoder(
        description,
        fields,
        windows=windowed(description),
        experts=checked(fields, experts),
        sparse=[True] * description.num_layers,
    )


def phi3(description: ModelDescription) -> DecoderConfig:
    """Phi-3 and Phi-4 (but the small and the vision ones)."""
    fields = fields_of(description)
    rotary = read_rotary(fields, description.head_size, description.context_length, partial=True)
    return decoder(
        description,
        fields,
        eps=1e-5,
        packed=True,
        windows=windowed(description),
        rotaries=(rotary,),
    )


def gemma(description: ModelDescription) -> DecoderConfig:
    """Gemma: scaled embeddings, norms that multiply by one more than their weight."""
    return _gemma(description, fields_of(description))


def _gemma(description: ModelDescription, fields: Fields, **more: Any) -> DecoderConfig:
    """Return what all Gemmas have, with ``more``."""
    bias = fields.flag("attention_bias", False)
    return decoder(
        description,
        fields,
        activation=fields.text("hidden_activation") or "gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=description.hidden_size**0.5,
        **more,
    )


def gemma2(description: ModelDescription, **more: Any) -> DecoderConfig:
    """Gemma 2: capped scores and logits, every other layer sees a window."""
    fields = fields_of(description)
    types = layer_types(description, fields, [SLIDING, FULL])
    changes = {
        "windows": windows_of(fields, types, 4096),
        "attention_cap": cap(fields, "attn_logit_softcapping", 50.0),
        "logit_cap": cap(fields, "final_logit_softcapping", 30.0),
        **more,
    }
    if fields.flag("use_bidirectional_attention", False):
        raise unsupported(fields, "use_bidirectional_attention", True)
    return _gemma(
        description,
        fields,
        norms_around=True,
        query_scale=fields.real("query_pre_attn_scalar", 256) ** -0.5,
        **changes,
    )


def gemma3(description: ModelDescription) -> DecoderConfig:
    """The text models of Gemma 3: as Gemma 2, with norms of queries and keys, and other rotary
    angles in layers that see a window.
    """
    fields = fields_of(description)
    pattern = fields.integer("sliding_window_pattern", 6, high=10_000)
    types = layer_types(description, fields, [SLIDING] * (pattern - 1) + [FULL])
    head, length = description.head_size, description.context_length
    if any(isinstance(value, dict) for value in (fields.table("rope_parameters") or {}).values()):
        local = read_rotary(fields, head, length, layer_type=SLIDING)
    else:
        theta = fields.real("rope_local_base_freq", 10_000.0)
        local = read_rotary(Fields(fields.path, {"rope_theta": theta}), head, length)
        fields = Fields(fields.path, {"rope_theta": 1_000_000.0, **fields.values})
    return gemma2(
        description,
        query_key_norm=True,
        attention_cap=cap(fields, "attn_logit_softcapping", None),
        logit_cap=cap(fields, "final_logit_softcapping", None),
        windows=windows_of(fields, types, 4096),
        rotaries=(read_rotary(fields, head, length, layer_type=FULL), local),
        rotary_of=[int(each == SLIDING) for each in types],
    )


ARCHITECTURES: Final = MappingProxyType[str, Reader](
    {
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "MixtralForCausalLM": mixtral,
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
        "Qwen2MoeForCausalLM": qwen2_moe,
        "Qwen3MoeForCausalLM": qwen3_moe,
        "Phi3ForCausalLM": phi3,
        "GemmaForCausalLM": gemma,
        "Gemma2ForCausalLM": gemma2,
        "Gemma3ForCausalLM": gemma3,
    }
)
"""Architecture (the Hugging Face class name) -> its reader."""

HEAD_SIZES: Final = MappingProxyType(
    {
        "Qwen3ForCausalLM": 128,
        "GemmaForCausalLM": 256,
        "Gemma2ForCausalLM": 256,
        "Gemma3ForCausalLM": 256,
    }
)
"""Architecture -> ``head_dim`` where a configuration does not say it, unless it is the width shared
out over the heads.
"""
