"""The kit's reference: a Llama's forward pass in numpy, float64, without a cache.

Attention of Vaswani et al. (2017) with grouped keys (Ainslie et al., 2023), rotary positions (Su et
al., 2021, the half-split layout of Hugging Face checkpoints), RMS norms and a gated SiLU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint

from hardpoint_conformance.oracle import Oracle

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest
    from hardpoint.checkpoints.description import ModelDescription


class LlamaOracle(Oracle):
    """Computes the model of a folder with float32 safetensors."""

    name = "the kit's Llama in numpy"

    def __init__(self, description: ModelDescription) -> None:
        self._shape = description
        self.weights = read_tensors(description.path)
        config = description.hf_config
        self._epsilon = float(config["rms_norm_eps"])  # type: ignore[arg-type]
        self._base = float(config["rope_theta"])  # type: ignore[arg-type]

    def adapted(self, adapter: LoRARequest) -> LlamaOracle:
        """Return the same model with ``W + B A lora_alpha / r`` for each matrix of the adapter
        (Hu et al., 2021).
        """
        other = copy(self)
        other.weights = self.weights | {
            name: self.weights[name] + change for name, change in changes_of(adapter.path).items()
        }
        return other

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return the logits after each token."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.states(tokens) @ head.T

    def states(self, tokens: Sequence[int]) -> Any:
        """Return the states that the logits are made of."""
        stream = self.weights["model.embed_tokens.weight"][list(tokens)]
        for layer in range(self._shape.num_layers):
            part = self._layer(layer)
            stream = stream + self._attention(part, _norm(stream, part["input"], self._epsilon))
            inner = _norm(stream, part["post"], self._epsilon)
            gate = inner @ part["gate"].T
            stream = stream + (gate / (1 + np.exp(-gate)) * (inner @ part["up"].T)) @ part["down"].T
        return _norm(stream, self.weights["model.norm.weight"], self._epsilon)

    def _layer(self, index: int) -> Mapping[str, Any]:
        names = {
            "input": "input_layernorm", "post": "post_attention_layernorm",
            "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        }  # fmt: skip
        return {
            short: self.weights[f"model.layers.{index}.{name}.weight"]
            for short, name in names.items()
        }

    def _attention(self, part: Mapping[str, Any], inner: Any) -> Any:
        shape, count = self._shape, len(inner)
        heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
        queries = self._rotated((inner @ part["q"].T).reshape(count, heads, size))
        keys = self._rotated((inner @ part["k"].T).reshape(count, kv_heads, size))
        values = (inner @ part["v"].T).reshape(count, kv_heads, size)
        keys, values = (each.repeat(heads // kv_heads, axis=1) for each in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(size)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, values).reshape(count, heads * size)
        return mixed @ part["o"].T

    def _rotated(self, vectors: Any) -> Any:
        count, _, size = vectors.shape
        angles = np.outer(np.arange(count), self._base ** (-np.arange(0, size, 2) / size))
        cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        first, second = vectors[..., : size // 2], vectors[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def changes_of(folder: str) -> dict[str, Any]:
    """Return weight's name -> what a LoRA adapter adds to it."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    arrays = read_tensors(folder)
    ending = ".lora_A.weight"
    names = [name.removesuffix(ending) for name in arrays if name.endswith(ending)]
    return {
        f"{name.removeprefix('base_model.model.')}.weight": scale
        * arrays[f"{name}.lora_B.weight"] @ arrays[f"{name}{ending}"]
        for name in names
    }  # fmt: skip


def read_tensors(folder: str | Path) -> dict[str, Any]:
    """Return the float32 tensors of a folder's safetensors as float64 arrays."""
    arrays = {}
    with SafetensorsCheckpoint(folder) as checkpoint:
        for name, entry in checkpoint.tensors.items():
            data = bytearray(entry.num_bytes)
            checkpoint.file_of(name).read_into(name, memoryview(data))
            floats = np.frombuffer(data, dtype=np.float32).reshape(entry.shape)
            arrays[name] = floats.astype(np.float64)
    return arrays


def _norm(stream: Any, weight: Any, epsilon: float) -> Any:
    return stream / np.sqrt((stream**2).mean(-1, keepdims=True) + epsilon) * weight
