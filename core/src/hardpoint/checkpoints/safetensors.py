"""Safetensors files and folders of them: header checked against the file, data as views.

Format: the safetensors README (an 8-byte little-endian length, a JSON header, then the data without
gaps).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from hardpoint.checkpoints.documents import parse_object, read_object
from hardpoint.checkpoints.files import contained
from hardpoint.checkpoints.tables import TensorEntry, check_layout, shown, some
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.errors import CheckpointError

ELEMENT_BITS: Final = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
        "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    }
)  # fmt: skip
LARGEST_HEADER: Final = 64 << 20
LARGEST_SIZE: Final = 1 << 48
MOST_DIMENSIONS: Final = 16
MOST_SHARDS: Final = 4096
ENTRY_KEYS: Final = frozenset(("dtype", "shape", "data_offsets"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFile(TensorFile):
    """One safetensors file, open. ``tensors`` is its table, ``data`` gives raw bytes.

    Raises CheckpointError, naming the file and the tensor, for anything that does not add up.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes, but the file has {size} and at "
                f"most {LARGEST_HEADER} are accepted: it is truncated, corrupt, or no safetensors "
                f"file; fetch it again"
            )
        header = parse_object(self._map[8 : 8 + length], self.path, "the header")
        self.metadata = _metadata(self.path, header.pop("__metadata__", {}))
        self.tensors = MappingProxyType(
            {name: _entry(self.path, name, row, 8 + length) for name, row in header.items()}
        )
        check_layout(self.path, self.tensors.values(), start=8 + length, end=size)


class SafetensorsCheckpoint:
    """All safetensors files of a folder, as one table. Shards come from the folder's index.

    ``tensors`` is in the order of the files, so that reading follows the disk.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.files: list[SafetensorsFile] = []
        self._home: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        index = contained(self.path, INDEX)
        if not _exists(self.path, SINGLE) and index.exists():
            assigned = _read_index(index)
            for shard in sorted(set(assigned.values())):
                self._add(shard)
            _check_index(index, assigned, {name: file.path for name, file in self._home.items()})
        else:
            self._add(_only_file(self.path))

    def _add(self, name: str) -> None:
        file = SafetensorsFile(contained(self.path, name))
        self.files.append(file)
        for tensor in file.tensors:
            if tensor in self._home:
                raise CheckpointError(
                    f"{file.path}: tensor {shown(tensor)} is also in {self._home[tensor].path}; "
                    f"each may be in one file only"
                )
            self._home[tensor] = file

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every tensor of every file, by name."""
        return {name: file.tensors[name] for name, file in self._home.items()}

    def file_of(self, name: str) -> SafetensorsFile:
        """Return the file that holds a tensor; KeyError if there is none."""
        return self._home[name]

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _metadata(path: Path, value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: __metadata__ of the header is not a table of strings")
    return MappingProxyType(value)


def _entry(path: Path, name: str, row: Any, start: int) -> TensorEntry:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}: {problem}: the header is corrupt")

    if not isinstance(row, dict) or set(row) != ENTRY_KEYS:
        raise fail("its row is not a table of dtype, shape and data_offsets")
    bits = ELEMENT_BITS.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    if bits is None:
        raise fail(f"its element type {shown(row['dtype'])} is unknown")
    shape, offsets = row["shape"], row["data_offsets"]
    if not _sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise fail(f"its shape {shown(shape)} is impossible")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"its data_offsets {shown(offsets)} are impossible")
    for size in shape:
        bits *= size
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise fail(
            f"shape {shape} of {row['dtype']} needs {bits / 8:g} bytes and data_offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return TensorEntry(
        name=name,
        shape=tuple(shape),
        type=row["dtype"],
        offset=start + offsets[0],
        num_bytes=bits // 8,
    )


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= LARGEST_SIZE for item in value
    )


def _exists(folder: Path, name: str) -> bool:
    return contained(folder, name).exists()


def _only_file(folder: Path) -> str:
    if _exists(folder, SINGLE):
        return SINGLE
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1:
        return names[0]
    if names:
        raise CheckpointError(
            f"{folder}: {len(names)} safetensors files ({some(names)}) and no {INDEX} that says "
            f"which belong together; fetch the index too"
        )
    unsafe = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl")
        for path in folder.glob(pattern)
    )
    hint = (
        f"; {some(unsafe)} could run code when opened and is never read: convert it to safetensors"
        if unsafe
        else f"; fetch {SINGLE}, or {INDEX} with its shards"
    )
    raise CheckpointError(f"{folder}: no safetensors file is in the folder{hint}")


def _read_index(index: Path) -> Mapping[str, str]:
    weights = read_object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {shown(tensor)} is said to be in {shown(name)}, which is no "
                f"safetensors file"
            )
    if len(shards := set(weights.values())) > MOST_SHARDS:
        raise CheckpointError(f"{index}: {len(shards)} files, at most {MOST_SHARDS} are accepted")
    return weights


def _check_index(index: Path, assigned: Mapping[str, str], found: Mapping[str, Path]) -> None:
    for tensor, name in assigned.items():
        if tensor not in found:
            raise CheckpointError(f"{index}: tensor {shown(tensor)} is not in {shown(name)}")
        if found[tensor] != index.parent / name:
            raise CheckpointError(
                f"{index}: tensor {shown(tensor)} is said to be in {shown(name)}, but it is in "
                f"{found[tensor]}"
            )
    if extra := [tensor for tensor in found if tensor not in assigned]:
        raise CheckpointError(f"{index}: the files hold tensors not listed: {some(extra)}")
