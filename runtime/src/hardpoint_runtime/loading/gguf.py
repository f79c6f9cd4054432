"""Weights out of a GGUF file, under the names and in the row order of Hugging Face models."""

from __future__ import annotations

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.llama import rotary_heads
from hardpoint.checkpoints.tables import TensorEntry
from hardpoint.checkpoints.weight_tables import gguf_weights
from torch import Tensor

from hardpoint_runtime.loading.packed import PLAIN, UNPACKERS, pair_rows_to_halves
from hardpoint_runtime.loading.weights import Weights

BLOCK_BYTES = {block.name: block.num_bytes for block in BLOCK_TYPES.values()}


class GGUFWeights(Weights):
    """Reads packed bytes into one scratch buffer, puts rows in order, then unpacks."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._file = GGUFFile(description.path)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            self._entries = gguf_weights(self._file, description, (*PLAIN, *UNPACKERS))
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read, order and unpack one tensor."""
        entry = self._entries[name]
        rows = self._packed_rows(entry)
        heads = rotary_heads(self._description, name)
        if heads is not None:
            rows = pair_rows_to_halves(rows, heads)
        if entry.type in PLAIN:
            values = rows.view(PLAIN[entry.type]).view(entry.shape)
            return values.to(dtype, copy=values.data_ptr() == self._scratch.data_ptr())
        blocks = rows.view(-1, BLOCK_BYTES[entry.type])
        return UNPACKERS[entry.type](blocks).view(entry.shape).to(dtype)

    def _packed_rows(self, entry: TensorEntry) -> Tensor:
        """Return the bytes as [rows, bytes of a row]; a vector's elements count as rows."""
        if self._scratch.numel() < entry.num_bytes:
            self._scratch = torch.empty(entry.num_bytes, dtype=torch.uint8)
        raw = self._scratch[: entry.num_bytes]
        self._file.read_into(entry.name, raw.numpy().data)
        return raw.view(entry.shape[0] if len(entry.shape) > 1 or entry.type in PLAIN else 1, -1)

    def close(self) -> None:
        """Close the file and drop the buffer."""
        self._file.close()
        self._scratch = torch.empty(0, dtype=torch.uint8)
