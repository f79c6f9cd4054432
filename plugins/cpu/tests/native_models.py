"""Tiny models of every family in folders, and engines over them with native programs or without."""

from __future__ import annotations

from pathlib import Path

import torch
from hardpoint_engine import LLM

ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
GEMMA = {"head_dim": 24, "num_hidden_layers": 4}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "heads": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "yarn": ("Llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 52, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 24}),
    "phi3": ("Phi3", {"head_dim": 18, "original_max_position_embeddings": 128}),
    "phi4": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0],
            },
            "hidden_size": 80,
        },
    ),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    ),
}  # fmt: skip
"""Family -> the transformers class's first name, and keys of its configuration."""

PROMPTS = [[(7 * i * i + 3 * i + n) % 90 + 3 for i in range(n)] for n in (1, 5, 12, 33, 70)]


def write(folder: Path, name: str, dtype: torch.dtype, change) -> None:
    """Write a tiny model of a family, changed by ``change(model)``, with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models

    family, keys = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, intermediate_size=100, max_position_embeddings=128, initializer_range=0.25,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **{
            "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, **keys,
        },
    )  # fmt: skip
    name = f"{family.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are ones and zeros
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        change(model)
    model.to(dtype).save_pretrained(folder)
    words = {f"w{number}": number for number in range(97)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def engine(
    folder, native: str, level: str = "auto", threads: int | None = None,
    activations: str = "float", **keys,
) -> LLM:  # fmt: skip
    options = {"native": native, "native_level": level, "activations": activations}
    if threads is not None:
        options["threads"] = threads
    return LLM(
        str(folder), platform="cpu", plugins={"cpu": options},
        **{
            "executor": "uni", "dtype": "float32", "max_model_len": 128, "block_size": 4,
            "num_kv_blocks": 200, **keys,
        },
    )  # fmt: skip


def program_threads(llm) -> int | None:
    """How many threads the engine's program has, None without one."""

    def count(worker):
        program = worker.model_runner.program
        return None if program is None else program.threads

    return llm.collective_rpc(count)[0]


def tokens(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]
