"""Weights out of a folder of safetensors files."""

from __future__ import annotations

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.weight_tables import safetensors_weights
from torch import Tensor

from hardpoint_runtime.loading.packed import PLAIN
from hardpoint_runtime.loading.weights import Weights


class SafetensorsWeights(Weights):
    """Reads each tensor straight into its own memory, in the order of the disk."""

    def __init__(self, description: ModelDescription) -> None:
        self._checkpoint = SafetensorsCheckpoint(description.path)
        try:
            self._entries = safetensors_weights(self._checkpoint, description, PLAIN)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

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
