"""Weights out of a GGUF file, under the names and in the row order of Hugging Face models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.ggml_types import BLOCK_BYTES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.tables import TensorEntry
from hardpoint.checkpoints.unpacking import READ_TYPES
from hardpoint.checkpoints.weight_tables import StoredWeight, gguf_weights
from torch import Tensor

from hardpoint_runtime.loading.packed import PLAIN, pair_rows_to_halves, unpack
from hardpoint_runtime.loading.weights import Weights
from hardpoint_runtime.quantization.packed_form import StoredRows


class GGUFWeights(Weights):
    """Reads packed bytes into one scratch buffer, puts rows in order, then unpacks."""

    def __init__(self, description: ModelDescription) -> None:
        self._file = GGUFFile(description.path)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            self._stored = gguf_weights(self._file, description, READ_TYPES)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: stored.entry.shape for name, stored in self._stored.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read, order and unpack one tensor."""
        stored = self._stored[name]
        entry = stored.entry
        rows = self._ordered_rows(stored)
        if entry.type not in PLAIN:
            values = unpack(entry.type, rows.view(-1, BLOCK_BYTES[entry.type])).view(entry.shape)
        else:
            values = rows.view(PLAIN[entry.type]).view(entry.shape)
        if stored.less_one:
            values = values.float() - 1
        return values.to(dtype, copy=values.data_ptr() == self._scratch.data_ptr())

    def stored_type(self, name: str) -> str | None:
        """Return the type; that of one whose numbers are changed is not told."""
        stored = self._stored[name]
        return None if stored.less_one else stored.entry.type

    def read_stored(self, name: str) -> StoredRows:
        """Read and order one tensor's rows; good until the next one is read."""
        stored = self._stored[name]
        entry = stored.entry
        return StoredRows(kind=entry.type, cols=entry.shape[-1], data=self._ordered_rows(stored))

    def files(self) -> Sequence[Path]:
        """Return the file."""
        return (self._file.path,)

    def _ordered_rows(self, stored: StoredWeight) -> Tensor:
        rows = self._packed_rows(stored.entry)
        heads = stored.rotary_heads
        return rows if heads is None else pair_rows_to_halves(rows, heads)

    def _packed_rows(self, entry: TensorEntry) -> Tensor:
        """Return the bytes as [rows, bytes of a row]; a vector's elements count as rows."""
        if self._scratch.numel() < entry.num_bytes:
            self._scratch = torch.empty(entry.num_bytes, dtype=torch.uint8)
        raw = self._scratch[: entry.num_bytes]
        self._file.read_part(entry, raw.numpy().data)
        return raw.view(entry.shape[0] if len(entry.shape) > 1 or entry.type in PLAIN else 1, -1)

    def close(self) -> None:
        """Close the file and drop the buffer."""
        self._file.close()
        self._scratch = torch.empty(0, dtype=torch.uint8)
