"""Tiny checkpoints of every built-in architecture, made by transformers: one row each.

``config`` is on top of COMMON. Another architecture is another row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 9}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.5, 2.5, 4.0, 9.0],
}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    **{
        f"llama-{kind}": (
            "Llama",
            {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **keys}},
        )
        for kind, keys in ROPES.items()
    },
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {**WINDOWS, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {**WINDOWS, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "phi3": ("Phi3", WINDOWS),
    "phi3-short": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 96}),
    "phi3-long": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 96}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {**WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {**WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 20}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-unnormalised": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen2-moe-shared": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**WINDOWS, "layer_types": ["sliding_attention"] * 3}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
}
"""What is not built in."""


def classes(family: str) -> tuple[Any, Any]:
    """Return the configuration and the model of transformers."""
    import transformers

    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, config), getattr(transformers, f"{family}ForCausalLM")


def save(name: str, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint of a row, its weights random and spread, and return its folder."""
    family, config = {**ROWS, **FOREIGN}[name]
    config_class, model_class = classes(family)
    torch.manual_seed(len(name))
    values = {**COMMON, "initializer_range": 0.2, **config, **changes}
    model = model_class(config_class(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are ones and zeros
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    return folder
