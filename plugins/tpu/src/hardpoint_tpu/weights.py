"""A checkpoint as a stream of numpy tensors, under Hugging Face names; read in the worker.

Tables are checked by the readers of :mod:`hardpoint.checkpoints`; the data go through the system's
own reads, so that a file that somebody shortens is an error and not the end of the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.float8 import Scale
from hardpoint.checkpoints.ggml_types import BLOCK_BYTES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.checkpoints.unpacking import READ_TYPES
from hardpoint.checkpoints.weight_source import HostArray, WeightSource, offered_source
from hardpoint.checkpoints.weight_tables import gguf_weights, safetensors_weights
from hardpoint.errors import UnsupportedModelError
from hardpoint.records import Offer

from hardpoint_tpu.packed import PLAIN, Floats, pairs_to_halves, unpack

DEVIATION = 0.02


def as_floats(array: HostArray) -> Floats:
    """Return an array of a source as float32."""
    return np.from_dlpack(array).astype(np.float32, copy=False)


def read_entry(file: TensorFile, entry: TensorEntry) -> Floats:
    """Read and unpack one tensor of an open file."""
    raw = np.empty(entry.num_bytes, np.uint8)
    if entry.num_bytes:
        file.read_part(entry, raw.data)
    if entry.type in PLAIN:
        return PLAIN[entry.type](raw).reshape(entry.shape)
    return unpack(entry.type, raw.reshape(-1, BLOCK_BYTES[entry.type])).reshape(entry.shape)


class SafetensorsSource(WeightSource):
    """A folder of safetensors files."""

    def __init__(self, description: ModelDescription) -> None:
        self._checkpoint = SafetensorsCheckpoint(description.path)
        try:
            self._stored = safetensors_weights(self._checkpoint, description, PLAIN)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: stored.entry.shape for name, stored in self._stored.items()}

    def read(self, name: str) -> Floats:
        """Read one tensor, and scale it if it is stored in eight bits with a scale."""
        stored = self._stored[name]
        values = self._values(stored.entry)
        if stored.scale is not None:
            values *= self._scale(stored.scale, stored.entry.shape)
        return values

    def _values(self, entry: TensorEntry) -> Floats:
        return read_entry(self._checkpoint.file_of(entry.name), entry)

    def _scale(self, scale: Scale, shape: tuple[int, ...]) -> Floats:
        """Return the scale, [rows or 1, columns or 1] of the weight."""
        values = self._values(scale.entry)
        for side in (0, 1):
            if values.shape[side] > 1:
                values = np.repeat(values, scale.block[side], axis=side)
        return values[: shape[0], : shape[1]]

    def close(self) -> None:
        """Close every file."""
        self._checkpoint.close()


class GGUFSource(WeightSource):
    """A GGUF file: packed tensors are unpacked, rotary rows put in order."""

    def __init__(self, description: ModelDescription) -> None:
        self._file = GGUFFile(description.path)
        try:
            self._stored = gguf_weights(self._file, description, READ_TYPES)
        except BaseException:
            self.close()
            raise
        self.shapes = {name: stored.entry.shape for name, stored in self._stored.items()}

    def read(self, name: str) -> Floats:
        """Read, unpack and order one tensor."""
        stored = self._stored[name]
        values = read_entry(self._file, stored.entry)
        if stored.less_one:
            values -= 1
        heads = stored.rotary_heads
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


def open_weights(
    description: ModelDescription, seed: int = 0, offers: Mapping[str, Offer] | None = None
) -> WeightSource:
    """Open the weights of a described model; ``seed`` is for ``dummy``. A loader among ``offers``
    for its format wins. Raises CheckpointError, and UnsupportedModelError for a format or a tensor
    type that is not known here.
    """
    offered: WeightSource | None = offered_source(offers or {}, description)
    if offered is not None:
        return offered
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
