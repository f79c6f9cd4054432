"""A worker's weights to files and back, as they are on its devices.

The one worker holds the whole model, however many devices share it, so its files hold whole tensors
under their checkpoint names, and any number of devices may load them again. The driver sees to the
folder, and writes the manifest (:mod:`hardpoint.checkpoints.saving`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.files import open_regular
from hardpoint.checkpoints.safetensors import SafetensorsFile
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.checkpoints.sharded_state import MANIFEST, check_files, located, read_manifest
from hardpoint.checkpoints.tables import FLOAT_TYPES, some
from hardpoint.checkpoints.weight_source import WeightSource
from hardpoint.errors import CancelledStepError, CheckpointError
from hardpoint.records import SavedFile, SavedTensor

from hardpoint_tpu.packed import Floats
from hardpoint_tpu.weights import read_entry

if TYPE_CHECKING:
    from hardpoint.records import WorkerContext

    from hardpoint_tpu.loaded_model import LoadedModel

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
BLOCK = 1 << 22
"""Bytes hashed at a time."""


def write_sharded_state(
    model: LoadedModel,
    context: WorkerContext,
    folder: Path,
    pattern: str | None = None,
    max_size: int | None = None,
) -> Sequence[SavedFile]:
    """Write the model to ``folder`` in files of at most ``max_size`` bytes; a tensor that is larger
    by itself has a file of its own. Called in the worker.

    Raises CheckpointError if the folder is none or a file cannot be written, CancelledStepError
    when the driver gives it up.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; create it first")
    parts = in_parts(
        [
            SavedTensor(name=name, dtype=model.dtype.name, shape=shape)
            for name, shape in model.tensor_shapes.items()
        ],
        max_size,
    )
    tensors = model.tensors()
    files = []
    for part, table in enumerate(parts):
        path = folder / (pattern or PATTERN).format(rank=context.rank, part=part, tp=0, pp=0)
        try:
            with SafetensorsWriter(path, table) as file:
                for tensor in table.tensors:
                    if context.cancelled():
                        raise CancelledStepError(f"saving was ended at {tensor.name}")
                    name, values = next(tensors)
                    if name != tensor.name:
                        raise CheckpointError(f"{path}: {name} came in place of {tensor.name}")
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be written: {error.strerror or error}"
            ) from error
        if file.saved is None:
            raise CheckpointError(f"{path}: was not finished")
        files.append(file.saved)
    return files


def in_parts(tensors: Sequence[SavedTensor], max_size: int | None) -> list[FileTable]:
    """Share tensors out to files of at most ``max_size`` bytes, in order; none is empty."""
    tables: list[FileTable] = []
    for tensor in tensors:
        if not tables or (max_size is not None and tables[-1].size_with(tensor) > max_size):
            tables.append(FileTable())
        tables[-1].add(tensor)
    return tables


class ShardedStateSource(WeightSource):
    """What a worker saved. Everything is checked before the first weight is read: how many workers
    there were, every tensor's name, shape and type, and the files' contents.
    """

    def __init__(
        self, description: ModelDescription, dtype: str, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        folder = description.path
        self._home: dict[str, SafetensorsFile] = {}
        self._files: list[SafetensorsFile] = []
        manifest = read_manifest(folder)
        if len(manifest.files) != 1:
            raise CheckpointError(
                f"{folder}: the sharded state was saved by {len(manifest.files)} workers, and here "
                f"is one, which needs whole tensors; load the original model"
            )
        _check_tensors(folder, manifest.files[0], dtype, shapes)
        check_files(folder, manifest.files[0])
        try:
            for file in manifest.files[0]:
                self._open(folder, file)
        except BaseException:
            self.close()
            raise
        self.shapes = shapes

    def _open(self, folder: Path, file: SavedFile) -> None:
        path = located(folder, file.name)
        source = SafetensorsFile(path)
        self._files.append(source)
        held = {
            name: (FLOAT_TYPES.get(entry.type), entry.shape)
            for name, entry in source.tensors.items()
        }
        if held != {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}:
            raise CheckpointError(
                f"{path}: its table is not what {MANIFEST} says; they do not belong together"
            )
        if (found := _digest(path)) != file.sha256:
            raise CheckpointError(
                f"{path}: the contents are not those that were saved (SHA-256 {found}, {MANIFEST} "
                f"says {file.sha256}): fetch the file again"
            )
        self._home.update(dict.fromkeys(held, source))

    def read(self, name: str) -> Floats:
        """Read one tensor."""
        source = self._home[name]
        return read_entry(source, source.tensors[name])

    def close(self) -> None:
        """Close every file."""
        for source in self._files:
            source.close()


def _digest(path: Path) -> str:
    digest = sha256()
    with open_regular(path) as file:
        while data := file.read(BLOCK):
            digest.update(data)
    return digest.hexdigest()


def _check_tensors(
    folder: Path, files: Sequence[SavedFile], dtype: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    saved = {tensor.name: tensor for file in files for tensor in file.tensors}
    wrong = [
        f"{name} ({list(saved[name].shape)} of {saved[name].dtype}, not {list(shape)} of {dtype})"
        for name, shape in shapes.items()
        if name in saved and (saved[name].shape, saved[name].dtype) != (shape, dtype)
    ]
    problems = {
        "missing": [name for name in shapes if name not in saved],
        "without a place in the model": [name for name in saved if name not in shapes],
        "different": wrong,
    }
    listed = [f"{len(found)} {what}: {some(found)}" for what, found in problems.items() if found]
    if listed:
        raise CheckpointError(
            f"{folder / MANIFEST}: the tensors are not the model's: {'; '.join(listed)}"
        )
