"""GGUF files: header and tensor table read once from a mapping, everything checked, data as views.

Format: the GGUF specification, versions 2 and 3, little-endian. All sizes are Python integers and
are compared with the size of the file before anything is built from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve

from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.gguf_metadata import (
    ARRAY,
    SCALARS,
    STRING,
    UNSIGNED_64,
    Cursor,
    Metadata,
)
from hardpoint.checkpoints.tables import TensorEntry, check_layout, shown
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.errors import CheckpointError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
UNSIGNED_32: Final = SCALARS[4]
MOST_KEYS: Final = 1 << 16
MOST_TENSORS: Final = 1 << 18
MOST_DIMENSIONS: Final = 4
LONGEST_NAME: Final = 1 << 10
LARGEST_ALIGNMENT: Final = 1 << 16
LEAST_KEY: Final = 8 + 4 + 1  # an empty name, a type, one byte
LEAST_TENSOR: Final = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, type, offset


class GGUFFile(TensorFile):
    """One GGUF file, open. ``metadata`` and ``tensors`` are mappings; ``data`` gives raw bytes.

    Used in the driver (description, tokenizer) and in workers (weights). Raises CheckpointError,
    naming the file and the key or tensor, for anything that is not as the specification says.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            cursor = Cursor(self.path, self._map)
            num_tensors, num_keys = _read_counts(cursor)
            self.metadata = Metadata(self.path, self._map, _read_metadata(cursor, num_keys))
            self.alignment = _alignment(self.path, self.metadata)
            self.tensors = MappingProxyType(_read_tensors(cursor, num_tensors, self.alignment))
        except BaseException:
            self.close()
            raise


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    cursor.need(4)
    if (magic := cursor.buffer[:4]) != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file: it begins with {magic!r}")
    cursor.position = 4
    version = cursor.scalar(UNSIGNED_32)
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "big-endian" if swapped else f"version {version}"
        raise CheckpointError(
            f"{cursor.path}: {kind} GGUF is not read; versions 2 and 3, little-endian, are: "
            f"convert the model again with current tools"
        )
    num_tensors, num_keys = cursor.scalar(UNSIGNED_64), cursor.scalar(UNSIGNED_64)
    for count, most, least, what in (
        (num_tensors, MOST_TENSORS, LEAST_TENSOR, "tensors"),
        (num_keys, MOST_KEYS, LEAST_KEY, "metadata keys"),
    ):
        if count > most:
            raise cursor.fail(f"it announces {count} {what}, where at most {most} are accepted")
        cursor.need(count * least)
    return num_tensors, num_keys


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        cursor.what = f"the name of metadata key {index}"
        key = cursor.string(LONGEST_NAME)
        cursor.what = f"metadata key {shown(key)}"
        if key in values:
            raise cursor.fail("the key appears twice")
        kind = cursor.scalar(UNSIGNED_32)
        if kind == STRING:
            values[key] = cursor.string()
        elif kind == ARRAY:
            values[key] = cursor.array()
        else:
            values[key] = cursor.number(kind)
    return values


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 8 <= value <= LARGEST_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {shown(value)}; it must be a power of two from 8 to "
            f"{LARGEST_ALIGNMENT}"
        )
    return int(value)


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for index in range(count):
        cursor.what = f"the name of tensor {index}"
        name = cursor.string(LONGEST_NAME)
        cursor.what = f"tensor {shown(name)}"
        if name in found:
            raise cursor.fail("the name appears twice")
        found[name] = _read_tensor(cursor, name, alignment)
    if not found:
        return {}
    start = -(-cursor.position // alignment) * alignment
    moved = {name: evolve(entry, offset=start + entry.offset) for name, entry in found.items()}
    check_layout(
        cursor.path, moved.values(), start=start, end=len(cursor.buffer), alignment=alignment
    )
    return moved


def _read_tensor(cursor: Cursor, name: str, alignment: int) -> TensorEntry:
    """Read one row; its offset still counts from the beginning of the data."""
    dimensions = cursor.scalar(UNSIGNED_32)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise cursor.fail(f"it has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible")
    sizes = [cursor.scalar(UNSIGNED_64) for _ in range(dimensions)]
    number, offset = cursor.scalar(UNSIGNED_32), cursor.scalar(UNSIGNED_64)
    block = BLOCK_TYPES.get(number)
    if block is None:
        raise cursor.fail(f"its type number {number} is unknown")
    if 0 in sizes:
        raise cursor.fail(f"a dimension of {sizes[::-1]} is zero")
    if sizes[0] % block.elements:
        raise cursor.fail(f"rows of {sizes[0]} are no multiple of {block.name}'s {block.elements}")
    if offset % alignment:
        raise cursor.fail(f"its offset {offset} is no multiple of the alignment {alignment}")
    num_bytes = block.num_bytes * (sizes[0] // block.elements)
    for size in sizes[1:]:
        num_bytes *= size
    if offset + num_bytes > len(cursor.buffer):
        raise CheckpointError(
            f"{cursor.path}: {cursor.what} has shape {sizes[::-1]} of {block.name}, {num_bytes} "
            f"bytes at {offset} of the data, but the whole file has {len(cursor.buffer)}: it is "
            f"truncated or corrupt; fetch it again"
        )
    return TensorEntry(
        name=name, shape=tuple(sizes[::-1]), type=block.name, offset=offset, num_bytes=num_bytes
    )
