"""Weights out of a folder of safetensors files."""

from __future__ import annotations

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.errors import UnsupportedModelError
from torch import Tensor

from hardpoint_runtime.loading.packed import PLAIN
from hardpoint_runtime.loading.weights import Weights


class SafetensorsWeights(Weights):
    """Reads each tensor straight into its own memory, in the order of the disk."""

    def __init__(self, description: ModelDescription) -> None:
        if method := description.hf_config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{description.path}: the weights are quantised ({shown(method)}), which is not "
                f"supported yet; use the original model"
            )
        self._checkpoint = SafetensorsCheckpoint(description.path)
        try:
            self._entries = self._usable()
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def _usable(self) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for file in self._checkpoint.files:
            for entry in sorted(file.tensors.values(), key=lambda entry: entry.offset):
                if entry.type not in PLAIN:
                    raise UnsupportedModelError(
                        f"{file.path}: tensor {shown(entry.name)} is of type {entry.type}, which "
                        f"cannot be used as a weight yet; supported: {', '.join(PLAIN)}"
                    )
                entries[entry.name] = entry
        return entries

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor."""
        entry = self._entries[name]
        values = torch.empty(entry.shape, dtype=PLAIN[entry.type])
        if entry.num_bytes:
            raw = values.view(-1).view(torch.uint8).numpy()
            self._checkpoint.file_of(name).read_into(name, raw.data)
        return values.to(dtype)

    def close(self) -> None:
        """Close every file."""
        self._checkpoint.close()
