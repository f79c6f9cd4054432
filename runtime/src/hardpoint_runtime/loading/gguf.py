"""Weights out of a GGUF file, under the names and in the row order of Hugging Face models."""

from __future__ import annotations

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.llama import hf_name, rotary_heads
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.errors import CheckpointError, UnsupportedModelError
from torch import Tensor

from hardpoint_runtime.loading.packed import PLAIN, UNPACKERS, pair_rows_to_halves
from hardpoint_runtime.loading.weights import Weights

BLOCK_BYTES = {block.name: block.num_bytes for block in BLOCK_TYPES.values()}


class GGUFWeights(Weights):
    """Reads packed bytes into one scratch buffer, puts rows in order, then unpacks."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._file = GGUFFile(description.path)
        self._entries: dict[str, TensorEntry] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            ordered = sorted(self._file.tensors.values(), key=lambda entry: entry.offset)
            for entry in ordered:
                self._add(entry)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def _add(self, entry: TensorEntry) -> None:
        where = f"{self._file.path}: tensor {shown(entry.name)}"
        if entry.type not in PLAIN and entry.type not in UNPACKERS:
            raise UnsupportedModelError(
                f"{where} is of type {entry.type}, which cannot be unpacked yet; supported: "
                f"{', '.join((*PLAIN, *UNPACKERS))}; convert the model to one of them"
            )
        name = hf_name(entry.name)
        if name is None or name in self._entries:
            raise CheckpointError(f"{where} stands for no weight, or for one that is there already")
        heads = rotary_heads(self._description, name)
        if heads is not None and entry.shape[0] % (2 * heads):
            raise CheckpointError(f"{where} has {entry.shape[0]} rows for {heads} heads")
        self._entries[name] = entry

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
