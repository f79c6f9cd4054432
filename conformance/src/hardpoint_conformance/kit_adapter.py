"""LoRA adapters for the kit's model, in the layout of PEFT, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.records import SavedTensor

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription


@frozen(kw_only=True)
class Adapter:
    """What is written: matrices ``A`` (rank, in) and ``B`` (out, rank) for each of ``targets``, of
    every layer. ``spread`` is the standard deviation of their numbers.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    spread: float
    seed: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lora_alpha {self.alpha}, on {', '.join(self.targets)}"


ADAPTERS = (
    Adapter(rank=4, alpha=16, targets=("q_proj", "v_proj"), spread=0.2, seed=1),
    Adapter(
        rank=2, alpha=3, spread=0.3, seed=2,
        targets=("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
)  # fmt: skip
"""Two that differ in all that could be taken for the same: rank, scale, matrices."""


def write_adapter(folder: Path, description: ModelDescription, adapter: Adapter) -> None:
    """Write adapter_config.json and adapter_model.safetensors into ``folder``."""
    config = {
        "peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0,
        "target_modules": list(adapter.targets), "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(adapter.seed)
    arrays = {}
    for layer in range(description.num_layers):
        for target in adapter.targets:
            part, width, inner = _place(target, description)
            prefix = f"base_model.model.model.layers.{layer}.{part}.{target}.lora_"
            arrays[f"{prefix}A.weight"] = rng.normal(0, adapter.spread, (adapter.rank, inner))
            arrays[f"{prefix}B.weight"] = rng.normal(0, adapter.spread, (width, adapter.rank))
    table = FileTable(metadata={"format": "pt"})
    for name, array in arrays.items():
        table.add(SavedTensor(name=name, dtype="float32", shape=array.shape))
    with SafetensorsWriter(folder / "adapter_model.safetensors", table) as file:
        for array in arrays.values():
            file.write(memoryview(array.astype(np.float32).tobytes()))


def _place(target: str, shape: ModelDescription) -> tuple[str, int, int]:
    """Return the module that a matrix is of, and its (out, in)."""
    heads, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    hidden, wide = shape.hidden_size, shape.intermediate_size
    sizes = {
        "q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
        "o_proj": (hidden, heads), "gate_proj": (wide, hidden), "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }  # fmt: skip
    part = "self_attn" if target[0] in "qkvo" else "mlp"
    return part, *sizes[target]
