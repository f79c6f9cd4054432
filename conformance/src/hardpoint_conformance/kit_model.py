"""The kit's own model: a tiny Llama with random weights, written on the spot, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
from attrs import frozen
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.records import Limits, SavedTensor

SMALLEST_HEAD = 8


@frozen(kw_only=True)
class ModelShape:
    """The sizes of a Llama. ``seed`` decides the weights."""

    head_size: int = SMALLEST_HEAD
    num_heads: int = 4
    num_kv_heads: int = 2
    num_layers: int = 2
    intermediate_size: int = 48
    vocab_size: int = 160
    context_length: int = 1024
    tied: bool = False
    seed: int = 1

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.head_size * self.num_heads

    @classmethod
    def within(cls, limits: Limits, **more: Any) -> Self:
        """Return the smallest shape that a platform with ``limits`` can execute."""
        sizes = [size for size in limits.head_sizes if size >= SMALLEST_HEAD] or limits.head_sizes
        return cls(head_size=min(sizes, default=SMALLEST_HEAD), **more)


def weights_of(shape: ModelShape) -> dict[str, Any]:
    """Return name -> float32 numpy array, as a checkpoint names and lays them out."""
    rng = np.random.default_rng(shape.seed)
    hidden, kv_width = shape.hidden_size, shape.num_kv_heads * shape.head_size

    def matrix(rows: int, columns: int, spread: float) -> Any:
        return rng.normal(0.0, spread, (rows, columns)).astype(np.float32)

    def norm() -> Any:
        return (1.0 + rng.normal(0.0, 0.1, hidden)).astype(np.float32)

    inner = 1.2 / float(np.sqrt(hidden))
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden, 1.0)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden, 2 * inner),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_width, hidden, 2 * inner),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_width, hidden, 2 * inner),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden, 2 * inner),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(shape.intermediate_size, hidden, inner),
            f"{prefix}mlp.up_proj.weight": matrix(shape.intermediate_size, hidden, inner),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, shape.intermediate_size, inner),
        }
    tensors["model.norm.weight"] = norm()
    if not shape.tied:
        tensors["lm_head.weight"] = matrix(shape.vocab_size, hidden, 2 * inner)
    return tensors


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Write config.json and model.safetensors into a new folder; return it."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    table = FileTable(metadata={"format": "pt"})
    tensors = weights_of(shape)
    for name, array in tensors.items():
        table.add(SavedTensor(name=name, dtype="float32", shape=array.shape))
    with SafetensorsWriter(folder / "model.safetensors", table) as file:
        for array in tensors.values():
            file.write(memoryview(array.tobytes()))
    return folder
