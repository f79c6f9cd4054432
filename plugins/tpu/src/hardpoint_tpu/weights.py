"""A checkpoint as a stream of numpy tensors, under Hugging Face names; read in the worker.

Tables are checked by the readers of :mod:`hardpoint.checkpoints`; the data go through the system's
own reads, so that a file that somebody shortens is an error and not the end of the process.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import numpy as np
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.llama import expected_shapes, rotary_heads
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.checkpoints.weight_tables import gguf_weights, safetensors_weights
from hardpoint.errors import UnsupportedModelError

from hardpoint_tpu.packed import PLAIN, UNPACKERS, Floats, pairs_to_halves

BLOCK_BYTES = {block.name: block.num_bytes for block in BLOCK_TYPES.values()}
DEVIATION = 0.02


class WeightSource(ABC):
    """``shapes`` maps each tensor's name to its shape, in the order of the disk. A context."""

    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def read(self, name: str) -> Floats:
        """Return a tensor as float32, the caller's own; KeyError if there is none of that name."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_entry(file: TensorFile, entry: TensorEntry) -> Floats:
    """Read and unpack one tensor of an open file."""
    raw = np.empty(entry.num_bytes, np.uint8)
    if entry.num_bytes:
        file.read_into(entry.name, raw.data)
    if entry.type in PLAIN:
        return PLAIN[entry.type](raw).reshape(entry.shape)
    return UNPACKERS[entry.type](raw.reshape(-1, BLOCK_BYTES[entry.type])).reshape(entry.shape)


class SafetensorsSource(WeightSource):
    """A folder of safetensors files."""

    def __init__(self, description: ModelDescription) -> None:
        self._checkpoint = SafetensorsCheckpoint(description.path)
        try:
            self._entries = safetensors_weights(self._checkpoint, description, PLAIN)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Floats:
        """Read one tensor."""
        return read_entry(self._checkpoint.file_of(name), self._entries[name])

    def close(self) -> None:
        """Close every file."""
        self._checkpoint.close()


class GGUFSource(WeightSource):
    """A GGUF file: packed tensors are unpacked, rotary rows put in order."""

    def __init__(self, description: ModelDescription) -> None:
        self._description = description
        self._file = GGUFFile(description.path)
        try:
            self._entries = gguf_weights(self._file, description, (*PLAIN, *UNPACKERS))
        except BaseException:
            self.close()
            raise
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> Floats:
        """Read, unpack and order one tensor."""
        values = read_entry(self._file, self._entries[name])
        heads = rotary_heads(self._description, name)
        return values if heads is None else pairs_to_halves(values, heads)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RandomSource(WeightSource):
    """Normal numbers for matrices, ones for norms, by the seed and the tensor's name: the same
    model as the torch toolkit makes of ``load_format = dummy``.
    """

    def __init__(self, description: ModelDescription, seed: int) -> None:
        self._seed = seed
        self.shapes = expected_shapes(description)

    def read(self, name: str) -> Floats:
        """Make one tensor."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        numbers = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        values = numbers.standard_normal(shape, dtype=np.float32)
        values *= DEVIATION
        return values

    def close(self) -> None:
        """Nothing is open."""


def open_weights(description: ModelDescription, seed: int = 0) -> WeightSource:
    """Open the weights of a described model; ``seed`` is for ``dummy``. Raises CheckpointError, and
    UnsupportedModelError for a format or a tensor type that is not known here.
    """
    if description.format == "gguf":
        return GGUFSource(description)
    if description.format == "safetensors":
        return SafetensorsSource(description)
    if description.format == "dummy":
        return RandomSource(description, seed)
    raise UnsupportedModelError(
        f"{description.path}: platform 'tpu' reads no weights of the format "
        f"{description.format!r}; it reads gguf, safetensors, dummy"
    )
