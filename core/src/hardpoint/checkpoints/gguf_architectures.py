"""What each architecture is called in GGUF files, and how its weights differ there: one table.

An architecture is added by a row of ``ARCHITECTURES``: the Hugging Face class of the same
computation, the names of the tensors of a layer, and which metadata keys say what a config.json
would. Names, the order of rotary rows and the offset of norms follow ``convert_hf_to_gguf.py`` and
``gguf-py`` (``tensor_mapping.py``) of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import field, frozen

OUTSIDE: Final = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
)
"""Tensors outside the layers, alike in every architecture here."""
BLOCK: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")

LLAMA, WITH_WINDOW, WITH_EXPERTS = "llama", "llama with a window", "llama with experts"
"""A Mistral and a Mixtral are stored under the name of a Llama."""
WINDOW: Final = "attention.sliding_window"
"""The metadata key, without the architecture's prefix, of a window in layers."""
_WINDOWED: Final = {WINDOW: "sliding_window"}

_QKV: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED: Final = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FOUR_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS: Final = {"ffn_gate_inp": "mlp.gate"}
_MERGED: Final = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERT_KEYS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


@frozen(kw_only=True)
class GGUFArchitecture:
    """One architecture, as GGUF files hold it.

    ``hf_class`` and ``model_type`` are what a config.json says. ``layer`` maps the tensors of a
    layer, GGUF to Hugging Face, and ``merged`` those that hold all experts of a layer, stacked
    (``{}`` is the expert's number). ``rotary_pairs``: query and key rows of a head are stored as
    pairs (0, half), (1, half + 1), ... instead of two halves. ``norms_plus_one``: a norm is stored
    as what it multiplies by, one more than the model's own weight. ``row_vectors`` are matrices of
    one row, stored as vectors. ``beside`` are tensors that the description reads and no weight
    comes from. ``implied_bias``: queries, keys and values have a bias of which a config.json does
    not speak.

    ``partly_rotated``: the heads may be, by ``rope.dimension_count``.

    ``whole`` and ``real`` map optional metadata keys, without the architecture's prefix, to those
    of a config.json; ``fixed`` are values of the config that the format does not record.
    ``width_scaled_depth``: the depth of the one size whose queries are scaled by hidden size over
    heads; all others by head size (key ``query_pre_attn_scalar``). None where there is no such key.
    """

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    merged: Mapping[str, str] = field(factory=dict)
    rotary_pairs: bool = False
    norms_plus_one: bool = False
    implied_bias: bool = False
    partly_rotated: bool = False
    row_vectors: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(factory=dict)
    real: Mapping[str, str] = field(factory=dict)
    fixed: Mapping[str, object] = field(factory=dict)
    width_scaled_depth: int | None = None

    def hf_name(self, gguf_name: str) -> str | None:
        """Return the Hugging Face name of a tensor; None if it is no weight of this architecture.

        For a stack of experts, ``{}`` stands for the expert's number.
        """
        if match := BLOCK.fullmatch(gguf_name):
            index, part, kind = match.groups()
            if part in self.layer:
                return f"model.layers.{int(index)}.{self.layer[part]}.{kind}"
            if part in self.merged and kind == "weight":
                return f"model.layers.{int(index)}.{self.merged[part]}.weight"
            return None
        part, _, kind = gguf_name.rpartition(".")
        return f"{OUTSIDE[part]}.{kind}" if part in OUTSIDE and kind in ("weight", "bias") else None


_GEMMA: Final = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

ARCHITECTURES: Final = MappingProxyType(
    {
        LLAMA: GGUFArchitecture(
            hf_class="LlamaForCausalLM",
            model_type="llama",
            layer={**_TWO_NORMS, **_QKV, **_GATED},
            rotary_pairs=True,
            beside=("rope_freqs.weight",),
        ),
        WITH_WINDOW: GGUFArchitecture(
            hf_class="MistralForCausalLM",
            model_type="mistral",
            layer={**_TWO_NORMS, **_QKV, **_GATED},
            rotary_pairs=True,
            whole=_WINDOWED,
        ),
        WITH_EXPERTS: GGUFArchitecture(
            hf_class="MixtralForCausalLM",
            model_type="mixtral",
            layer={**_TWO_NORMS, **_QKV, "ffn_gate_inp": "block_sparse_moe.gate"},
            merged={
                "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            },
            rotary_pairs=True,
            whole={
                **_WINDOWED,
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
            },
        ),
        "qwen2": GGUFArchitecture(
            hf_class="Qwen2ForCausalLM",
            model_type="qwen2",
            implied_bias=True,
            layer={**_TWO_NORMS, **_QKV, **_GATED},
        ),
        "qwen3": GGUFArchitecture(
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            layer={**_TWO_NORMS, **_QKV, **_QK_NORMS, **_GATED},
        ),
        "qwen2moe": GGUFArchitecture(
            hf_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            implied_bias=True,
            layer={**_TWO_NORMS, **_QKV, **_EXPERTS, **_SHARED_EXPERT},
            merged=_MERGED,
            row_vectors=("ffn_gate_inp_shexp",),
            whole=_EXPERT_KEYS,
            fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        "qwen3moe": GGUFArchitecture(
            hf_class="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            layer={**_TWO_NORMS, **_QKV, **_QK_NORMS, **_EXPERTS},
            merged=_MERGED,
            whole=_EXPERT_KEYS,
            fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        "phi3": GGUFArchitecture(
            hf_class="Phi3ForCausalLM",
            model_type="phi3",
            partly_rotated=True,
            layer={
                **_TWO_NORMS,
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
            beside=("rope_factors_long.weight", "rope_factors_short.weight"),
            whole=_WINDOWED,
        ),
        "gemma": GGUFArchitecture(
            hf_class="GemmaForCausalLM",
            model_type="gemma",
            layer={**_TWO_NORMS, **_QKV, **_GATED},
            norms_plus_one=True,
            fixed=_GEMMA,
        ),
        "gemma2": GGUFArchitecture(
            hf_class="Gemma2ForCausalLM",
            model_type="gemma2",
            layer={**_FOUR_NORMS, **_QKV, **_GATED},
            norms_plus_one=True,
            whole=_WINDOWED,
            real=_CAPS,
            fixed=_GEMMA,
            width_scaled_depth=46,
        ),
        "gemma3": GGUFArchitecture(
            hf_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer={**_FOUR_NORMS, **_QKV, **_QK_NORMS, **_GATED},
            norms_plus_one=True,
            whole=_WINDOWED,
            real=_CAPS,
            fixed={**_GEMMA, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
            width_scaled_depth=62,
        ),
    }
)
"""GGUF's name of an architecture (``general.architecture``) -> what is to be known of it."""

NAMES: Final = tuple(sorted(name for name in ARCHITECTURES if " " not in name))
"""What ``general.architecture`` may be."""


def architecture_of(metadata: Mapping[str, object]) -> GGUFArchitecture | None:
    """Return the architecture of a file with this metadata; None if it is not in the table."""
    name = str(metadata.get("general.architecture"))
    if name == LLAMA:
        for key, kind in (("expert_count", WITH_EXPERTS), (WINDOW, WITH_WINDOW)):
            value = metadata.get(f"{LLAMA}.{key}")
            if isinstance(value, int) and value > 0:
                return ARCHITECTURES[kind]
    return ARCHITECTURES.get(name)
