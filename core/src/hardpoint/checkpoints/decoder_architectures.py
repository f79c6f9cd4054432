"""The architectures that are built in, each as a function from its configuration to a decoder.

Keys and defaults are those of Hugging Face configurations of that architecture. Whatever a function
does not read, it does not have: it refuses what would change the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

from hardpoint.checkpoints.decoder import DecoderConfig, ExpertsConfig, LayerConfig
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.rotary import read_rotary
from hardpoint.checkpoints.tables import shown
from hardpoint.errors import UnsupportedModelError

ACTIVATIONS: Final = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)
FULL, SLIDING = "full_attention", "sliding_attention"

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
    fields = _fields(description)
    bias = fields.flag("attention_bias", False)
    return _decoder(
        description,
        fields,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(description: ModelDescription) -> DecoderConfig:
    """Mistral: every layer sees a window, if the configuration has one."""
    return _decoder(description, _fields(description), windows=_windowed(description))


def qwen2(description: ModelDescription) -> DecoderConfig:
    """Qwen 2 and 2.5: queries, keys and values have biases."""
    return _decoder(
        description, _fields(description), qkv_bias=True, windows=_some_windows(description)
    )


def qwen3(description: ModelDescription, **more: Any) -> DecoderConfig:
    """Qwen 3: the heads of queries and keys are normalised."""
    fields = _fields(description)
    bias = fields.flag("attention_bias", False)
    return _decoder(
        description,
        fields,
        query_key_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=_some_windows(description),
        **more,
    )


def qwen3_moe(description: ModelDescription) -> DecoderConfig:
    """Qwen 3 with experts in some layers."""
    fields = _fields(description)
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
    )
    return qwen3(description, experts=_checked(fields, experts), sparse=sparse)


def mixtral(description: ModelDescription) -> DecoderConfig:
    """Mixtral: a Mistral whose every MLP is a mixture of experts."""
    fields = _fields(description)
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
    return _decoder(
        description,
        fields,
        windows=_windowed(description),
        experts=_checked(fields, experts),
        sparse=[True] * description.num_layers,
    )


def phi3(description: ModelDescription) -> DecoderConfig:
    """Phi-3 and Phi-4 (but the small and the vision ones)."""
    fields = _fields(description)
    rotary = read_rotary(fields, description.head_size, description.context_length, partial=True)
    return _decoder(
        description,
        fields,
        eps=1e-5,
        packed=True,
        windows=_windowed(description),
        rotaries=(rotary,),
    )


def gemma(description: ModelDescription) -> DecoderConfig:
    """Gemma: scaled embeddings, norms that multiply by one more than their weight."""
    fields = _fields(description)
    bias = fields.flag("attention_bias", False)
    return _decoder(
        description,
        fields,
        activation=fields.text("hidden_activation") or "gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=description.hidden_size**0.5,
    )


def gemma2(description: ModelDescription, **more: Any) -> DecoderConfig:
    """Gemma 2: capped scores and logits, every other layer sees a window."""
    fields = _fields(description)
    types = _layer_types(description, fields, [SLIDING, FULL])
    changes = {
        "windows": _of_types(fields, types, 4096),
        "attention_cap": _cap(fields, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(fields, "final_logit_softcapping", 30.0),
        **more,
    }
    bias = fields.flag("attention_bias", False)
    if fields.flag("use_bidirectional_attention", False):
        raise _unsupported(fields, "use_bidirectional_attention", True)
    return _decoder(
        description,
        fields,
        activation=fields.text("hidden_activation") or "gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        norms_around=True,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=description.hidden_size**0.5,
        query_scale=fields.real("query_pre_attn_scalar", 256) ** -0.5,
        **changes,
    )


def gemma3(description: ModelDescription) -> DecoderConfig:
    """The text models of Gemma 3: as Gemma 2, with norms of queries and keys, and other rotary
    angles in layers that see a window.
    """
    fields = _fields(description)
    pattern = fields.integer("sliding_window_pattern", 6, high=10_000)
    types = _layer_types(description, fields, [SLIDING] * (pattern - 1) + [FULL])
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
        attention_cap=_cap(fields, "attn_logit_softcapping", None),
        logit_cap=_cap(fields, "final_logit_softcapping", None),
        windows=_of_types(fields, types, 4096),
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


def _fields(description: ModelDescription) -> Fields:
    return Fields(description.path, description.hf_config)


def _decoder(
    description: ModelDescription,
    fields: Fields,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str | None = None,
    windows: Sequence[int | None] = (),
    sparse: Sequence[bool] = (),
    rotary_of: Sequence[int] = (),
    **more: Any,
) -> DecoderConfig:
    activation = activation or fields.text("hidden_act", "silu") or "silu"
    if activation not in ACTIVATIONS:
        raise _unsupported(fields, "the activation", activation, f"known: {', '.join(ACTIVATIONS)}")
    count, head = description.num_layers, description.head_size
    layers = tuple(
        LayerConfig(window=window, sparse=has_experts, rotary=rotary)
        for window, has_experts, rotary in zip(
            windows or [None] * count,
            sparse or [False] * count,
            rotary_of or [0] * count,
            strict=True,
        )
    )
    if "rotaries" not in more:
        more["rotaries"] = (read_rotary(fields, head, description.context_length),)
    return DecoderConfig(
        **{
            "layers": layers,
            "norm_eps": fields.real("rms_norm_eps", eps),
            "tied": fields.flag("tie_word_embeddings", tied),
            "query_scale": head**-0.5,
            "activation": ACTIVATIONS[activation],
            **more,
        }
    )


def _windowed(description: ModelDescription) -> list[int | None]:
    window = _fields(description).integer("sliding_window", 0)
    return [window or None] * description.num_layers


def _some_windows(description: ModelDescription) -> list[int | None]:
    """Return Qwen's: layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    fields = _fields(description)
    if not fields.flag("use_sliding_window", False):
        return [None] * description.num_layers
    first = fields.integer("max_window_layers", 28, low=0)
    default = [FULL if index < first else SLIDING for index in range(description.num_layers)]
    return _of_types(fields, _layer_types(description, fields, default), 4096)


def _layer_types(
    description: ModelDescription, fields: Fields, pattern: Sequence[str]
) -> list[str]:
    """Return ``layer_types``, or ``pattern`` over and over."""
    count = description.num_layers
    stated = fields.values.get("layer_types")
    if stated is None:
        return [pattern[index % len(pattern)] for index in range(count)]
    if not isinstance(stated, list) or len(stated) != count:
        raise fields.fail("layer_types", stated, f"a list of {count} types")
    for each in stated:
        if each not in (FULL, SLIDING):
            raise _unsupported(fields, "layer_types", each, f"known: {FULL}, {SLIDING}")
    return stated


def _of_types(fields: Fields, types: Sequence[str], default: int) -> list[int | None]:
    window = fields.integer("sliding_window", default)
    return [window if each == SLIDING else None for each in types]


def _cap(fields: Fields, key: str, default: float | None) -> float | None:
    if key in fields.values and fields.values[key] is None:
        return None
    return default if fields.values.get(key) is None else fields.real(key)


def _checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise fields.fail("num_experts_per_tok", experts.per_token, f"at most {experts.count}")
    return experts


def _unsupported(
    fields: Fields, key: str, value: object, known: str | None = None
) -> UnsupportedModelError:
    hint = "" if known is None else f"; {known}"
    return UnsupportedModelError(
        f"{fields.path}: {key} is {shown(value)}, which the built-in model does not support{hint}"
    )
