"""Writing one safetensors file, without an array library: the table first, then the bytes, hashed
on the way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from attrs import define, field

from hardpoint.checkpoints.safetensors import ELEMENT_BITS
from hardpoint.checkpoints.tables import FLOAT_TYPES
from hardpoint.records import SavedFile, SavedTensor

TYPE_OF: Final = MappingProxyType({dtype: kind for kind, dtype in FLOAT_TYPES.items()})
"""Name of the dtype -> the format's name of it."""
ALIGNMENT: Final = 8
"""The data begins at a multiple of this many bytes, as the format's own writers see to."""


@define(eq=False)
class FileTable:
    """The table of a file that is not written yet; says how long the file would be."""

    metadata: Mapping[str, str] = field(factory=dict)
    tensors: list[SavedTensor] = field(factory=list)
    num_bytes: int = 0
    """Bytes of the tensors, without the table."""
    _rows: dict[str, object] = field(factory=dict)
    _length: int = 0

    def size_with(self, tensor: SavedTensor) -> int:
        """Return the bytes of the whole file if ``tensor`` were in it too."""
        row = self._row(tensor)
        length = self._length + _row_length(tensor.name, row)
        return _start(length, self.metadata) + self.num_bytes + tensor_bytes(tensor)

    def add(self, tensor: SavedTensor) -> None:
        """Append a tensor."""
        row = self._row(tensor)
        self._length += _row_length(tensor.name, row)
        self._rows[tensor.name] = row
        self.tensors.append(tensor)
        self.num_bytes += tensor_bytes(tensor)

    def header(self) -> bytes:
        """Return what the file begins with."""
        table = {"__metadata__": dict(self.metadata), **self._rows}
        text = _json(table)
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def _row(self, tensor: SavedTensor) -> dict[str, object]:
        end = self.num_bytes + tensor_bytes(tensor)
        return {
            "dtype": TYPE_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.num_bytes, end],
        }


class SafetensorsWriter:
    """Writes a file that must not exist yet; used as a context. The tensors' bytes are given in the
    order of the table. After :meth:`close`, ``saved`` describes the file, which is on the disk.
    """

    def __init__(self, path: Path, table: FileTable) -> None:
        self._table = table
        self._left = table.num_bytes
        self._hash = sha256()
        self._path = path
        self._size = 0
        self._file = path.open("xb")
        self.saved: SavedFile | None = None
        self._put(table.header())

    def write(self, data: memoryview) -> None:
        """Append the bytes of the next tensor, or a part of them."""
        self._left -= data.nbytes
        self._put(data)

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._size += len(data) if isinstance(data, bytes) else data.nbytes

    def close(self) -> None:
        """Bring the file to the disk. Raises ValueError if its tensors are not whole."""
        try:
            if self._left:
                raise ValueError(f"{self._path}: {self._left} bytes of its tensors were not given")
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        self.saved = SavedFile(
            name=self._path.name,
            sha256=self._hash.hexdigest(),
            num_bytes=self._size,
            tensors=tuple(self._table.tensors),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def tensor_bytes(tensor: SavedTensor) -> int:
    """Return the bytes of a tensor."""
    bits = ELEMENT_BITS[TYPE_OF[tensor.dtype]]
    for size in tensor.shape:
        bits *= size
    return bits // 8


def _start(rows: int, metadata: Mapping[str, str]) -> int:
    """Return where the data begins if the rows of the table take ``rows`` characters."""
    length = len(_json({"__metadata__": dict(metadata)})) + rows
    return -(-(8 + length) // ALIGNMENT) * ALIGNMENT


def _row_length(name: str, row: object) -> int:
    return len(_json({name: row})) - 2 + 1  # without braces, with a comma


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
