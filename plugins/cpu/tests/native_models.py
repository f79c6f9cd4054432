"""Tiny models of every family in folders, and engines over them with native programs or without."""

from __future__ import annotations

from pathlib import Path

import torch
from hardpoint_engine import LLM

FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "heads": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}  # fmt: skip
PROMPTS = [[(7 * i * i + 3 * i + n) % 90 + 3 for i in range(n)] for n in (1, 5, 12, 33, 70)]


def write(folder: Path, name: str, dtype: torch.dtype, change) -> None:
    """Write a tiny model of a family, changed by ``change(model)``, with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models

    family, keys = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, intermediate_size=100, num_hidden_layers=3,
        max_position_embeddings=128, initializer_range=0.25,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **{"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, **keys},
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are ones and zeros
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        change(model)
    model.to(dtype).save_pretrained(folder)
    words = {f"w{number}": number for number in range(97)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def engine(folder, native: str, level: str = "auto", threads: int | None = None, **keys) -> LLM:
    options = {"native": native, "native_level": level}
    if threads is not None:
        options["threads"] = threads
    return LLM(
        str(folder), platform="cpu", executor="uni", plugins={"cpu": options},
        **{"dtype": "float32", "max_model_len": 128, "block_size": 4, "num_kv_blocks": 200, **keys},
    )  # fmt: skip


def program_threads(llm) -> int | None:
    """How many threads the engine's program has, None without one."""

    def count(worker):
        program = worker.model_runner.program
        return None if program is None else program.threads

    return llm.collective_rpc(count)[0]


def tokens(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]
