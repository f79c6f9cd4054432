"""Weights out of a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.float8 import Scale
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry
from hardpoint.checkpoints.weight_tables import safetensors_weights
from torch import Tensor

from hardpoint_runtime.loading.packed import FLOAT8, PLAIN
from hardpoint_runtime.loading.weights import Weights

READ = {**PLAIN, **FLOAT8}


class SafetensorsWeights(Weights):
    """Reads each tensor straight into its own memory, in the order of the disk."""

    def __init__(self, description: ModelDescription) -> None:
        self._checkpoint = SafetensorsCheckpoint(description.path)
        try:
            self._stored = safetensors_weights(self._checkpoint, description, READ)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: stored.entry.shape for name, stored in self._stored.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor, and scale it if it is stored in eight bits with a scale."""
        stored = self._stored[name]
        values = self._values(stored.entry)
        if stored.scale is not None:
            values = values.float().mul_(self._scale(stored.scale, stored.entry.shape))
        return values.to(dtype)

    def stored_type(self, name: str) -> str | None:
        """Return the element type; that of one that is scaled is not told."""
        stored = self._stored[name]
        return None if stored.scale is not None else stored.entry.type

    def files(self) -> Sequence[Path]:
        """Return every file of the checkpoint."""
        return tuple(file.path for file in self._checkpoint.files)

    def _values(self, entry: TensorEntry) -> Tensor:
        values = torch.empty(entry.shape, dtype=READ[entry.type])
        if entry.num_bytes:
            raw = values.view(-1).view(torch.uint8).numpy()
            self._checkpoint.file_of(entry.name).read_part(entry, raw.data)
        return values

    def _scale(self, scale: Scale, shape: tuple[int, ...]) -> Tensor:
        """Return the scale in float32, [rows or 1, columns or 1] of the weight."""
        values = self._values(scale.entry).float()
        for side in (0, 1):
            if values.shape[side] > 1:
                values = values.repeat_interleave(scale.block[side], dim=side)
                values = values.narrow(side, 0, shape[side])
        return values

    def close(self) -> None:
        """Close every file."""
        self._checkpoint.close()
