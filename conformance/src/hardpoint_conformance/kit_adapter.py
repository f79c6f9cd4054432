"""A LoRA adapter for the kit's model, in the layout of PEFT, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.records import SavedTensor

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription

RANK = 4


def write_adapter(folder: Path, description: ModelDescription, seed: int) -> Path:
    """Write adapter_config.json and adapter_model.safetensors into ``folder``; return it."""
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"], "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    widths = {
        "q_proj": description.num_heads * description.head_size,
        "v_proj": description.num_kv_heads * description.head_size,
    }
    arrays = {}
    for layer in range(description.num_layers):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            arrays[f"{prefix}A.weight"] = rng.normal(0, 0.5, (RANK, description.hidden_size))
            arrays[f"{prefix}B.weight"] = rng.normal(0, 0.5, (width, RANK))
    table = FileTable(metadata={"format": "pt"})
    for name, array in arrays.items():
        table.add(SavedTensor(name=name, dtype="float32", shape=array.shape))
    with SafetensorsWriter(folder / "adapter_model.safetensors", table) as file:
        for array in arrays.values():
            file.write(memoryview(array.astype(np.float32).tobytes()))
    return folder
