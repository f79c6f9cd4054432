"""A rank's own tensors to files and back, as they are in memory: no rank reads what another has.

The driver sees to the folder, and writes the manifest (:mod:`hardpoint.checkpoints.saving`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from hardpoint.checkpoints.files import open_regular
from hardpoint.checkpoints.safetensors import SafetensorsFile
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.checkpoints.sharded_state import (
    MANIFEST,
    Manifest,
    check_files,
    located,
    read_manifest,
)
from hardpoint.checkpoints.tables import FLOAT_TYPES, shown, some
from hardpoint.errors import CancelledStepError, CheckpointError, UnsupportedError
from hardpoint.records import SavedFile, SavedTensor

from hardpoint_runtime.parallel.groups import Topology

if TYPE_CHECKING:
    from hardpoint.records import WorkerContext

    from hardpoint_runtime.models.language_model import LanguageModel

_logger = logging.getLogger("hardpoint.worker")

SHARDS_ONLY: Final = "model-rank-{rank}-part-{part}.safetensors"
STAGES: Final = "model-pp-{pp}-tp-{tp}-part-{part}.safetensors"
"""Names of files where none are asked for: without pipeline stages, and with them."""
NAMES: Final = MappingProxyType(
    {
        torch.float64: "float64",
        torch.float32: "float32",
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
    }
)


MOST_TOLD: Final = 5
"""Tensors of another shape or type that an error shows."""


def held_tensors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return checkpoint name -> this rank's part of the weight, as a view of the model's memory.

    Of names that stand for the same memory there is one: the one that covers the others, or the
    first in the alphabet.
    """
    views = {name: slot.view().detach() for name, slot in model.weight_slots().items()}
    spans = {name: _span(view) for name, view in views.items()}
    covered: dict[int, int] = {}
    kept = set()
    for name in sorted(views, key=lambda name: (spans[name][1], -spans[name][2], name)):
        storage, start, end = spans[name]
        if end > covered.get(storage, start) or start == end:
            covered[storage] = end
            kept.add(name)
    return {name: view for name, view in views.items() if name in kept}


def _span(view: torch.Tensor) -> tuple[int, int, int]:
    """Return the memory behind ``view``, and the first and last byte it has of it."""
    start = view.storage_offset() * view.element_size()
    steps = zip(view.shape, view.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in steps) + 1 if view.numel() else 0
    end = start + reach * view.element_size()
    return view.untyped_storage().data_ptr(), int(start), int(end)


def described(tensors: Mapping[str, torch.Tensor]) -> list[SavedTensor]:
    """Return the tensors as a manifest has them. Raises UnsupportedError for a type of element that
    is none of weights.
    """
    found = []
    for name, tensor in tensors.items():
        dtype = NAMES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"a sharded state with tensors of {tensor.dtype}", "hardpoint-runtime", reason=name
            )
        found.append(SavedTensor(name=name, dtype=dtype, shape=tuple(tensor.shape)))
    return found


def save_sharded_state(
    model: LanguageModel,
    context: WorkerContext,
    folder: Path,
    pattern: str | None = None,
    max_size: int | None = None,
) -> Sequence[SavedFile]:
    """Write this rank's part of ``model`` to ``folder`` in files of at most ``max_size`` bytes; a
    tensor that is larger by itself has a file of its own. Called in the worker.

    Raises CheckpointError if the folder is none or a file cannot be written, CancelledStepError
    when the driver gives it up.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; create it first")
    parallel = context.config.parallel
    place = Topology.of(parallel).place_of(context.rank)
    pattern = pattern or (SHARDS_ONLY if parallel.pipeline_parallel_size == 1 else STAGES)
    tensors = held_tensors(model)
    files = []
    for part, table in enumerate(in_parts(described(tensors), max_size)):
        name = pattern.format(rank=context.rank, part=part, tp=place.tensor, pp=place.pipeline)
        files.append(_write(folder / name, table, tensors, context))
    return files


def in_parts(tensors: Sequence[SavedTensor], max_size: int | None) -> list[FileTable]:
    """Share tensors out to files of at most ``max_size`` bytes, in order; none is empty."""
    tables: list[FileTable] = []
    for tensor in tensors:
        full = max_size is not None and tables and tables[-1].size_with(tensor) > max_size
        if full or not tables:
            tables.append(FileTable())
            if max_size is not None and (size := tables[-1].size_with(tensor)) > max_size:
                _logger.warning(
                    "%s needs a file of %d bytes, more than max_size = %d",
                    tensor.name, size, max_size,
                )  # fmt: skip
        tables[-1].add(tensor)
    return tables


def _write(
    path: Path, table: FileTable, tensors: Mapping[str, torch.Tensor], context: WorkerContext
) -> SavedFile:
    try:
        with SafetensorsWriter(path, table) as file:
            for tensor in table.tensors:
                if context.cancelled():
                    raise CancelledStepError(f"saving was ended at {tensor.name}")
                file.write(_bytes(tensors[tensor.name].cpu().contiguous()))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    if file.saved is None:
        raise CheckpointError(f"{path}: was not finished")
    return file.saved


def load_sharded_state(model: LanguageModel, folder: Path, context: WorkerContext) -> int:
    """Fill ``model`` with what this rank saved in ``folder``; return the bytes.

    Raises CheckpointError, with every difference, before any weight is read: for another number of
    ranks, and for tensors that are missing, superfluous, or of another shape or type than the
    model's. Then for a file whose contents are not those that were saved.
    """
    manifest = read_manifest(folder)
    files = _own_files(folder, manifest, context)
    targets = held_tensors(model)
    _check_tensors(folder, context.rank, files, described(targets), manifest)
    check_files(folder, files)
    opened = [SafetensorsFile(located(folder, file.name)) for file in files]
    try:
        for file, source in zip(files, opened, strict=True):
            _check_table(file, source)
        for file, source in zip(files, opened, strict=True):
            _read(file, source, targets, context)
    finally:
        for source in opened:
            source.close()
    return sum(tensor.nbytes for tensor in targets.values())


def _own_files(folder: Path, manifest: Manifest, context: WorkerContext) -> Sequence[SavedFile]:
    different = manifest.differs(context.config.parallel, context.world_size)
    if different is None and len(manifest.files) == context.world_size:
        return manifest.files[context.rank]
    key, saved = different or ("the number of workers", len(manifest.files))
    raise CheckpointError(
        f"{folder}: the sharded state was saved with {key} = {saved}, and each rank loads what a "
        f"rank saved; load it with {key} = {saved}, or load the original model"
    )


def _check_tensors(
    folder: Path,
    rank: int,
    files: Sequence[SavedFile],
    needed: Sequence[SavedTensor],
    manifest: Manifest,
) -> None:
    saved = {tensor.name: tensor for file in files for tensor in file.tensors}
    names = {tensor.name for tensor in needed}
    wrong = [tensor for tensor in needed if saved.get(tensor.name, tensor) != tensor]
    missing = [tensor.name for tensor in needed if tensor.name not in saved]
    extra = [name for name in saved if name not in names]
    told = [
        *([f"{len(missing)} missing: {some(missing)}"] if missing else ()),
        *([f"{len(extra)} without a place in the model: {some(extra)}"] if extra else ()),
        *(
            f"{shown(tensor.name)} is {_form(saved[tensor.name])}, not {_form(tensor)}"
            for tensor in wrong[:MOST_TOLD]
        ),
        *([f"{len(wrong) - MOST_TOLD} more differ"] if len(wrong) > MOST_TOLD else ()),
    ]
    if told:
        raise CheckpointError(
            f"{folder / MANIFEST}: the tensors of rank {rank} are not the model's: "
            f"{'; '.join(told)}. They were saved as {manifest.dtype} by hardpoint "
            f"{manifest.version} ({'; '.join(manifest.plugins) or 'no plugins'}); load them with "
            "the same settings, or load the original model"
        )


def _form(tensor: SavedTensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _check_table(file: SavedFile, source: SafetensorsFile) -> None:
    entries = {
        name: (FLOAT_TYPES.get(entry.type), entry.shape) for name, entry in source.tensors.items()
    }
    if entries != {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}:
        raise CheckpointError(
            f"{source.path}: its table is not what {MANIFEST} says; they do not belong together"
        )


def _read(
    file: SavedFile,
    source: SafetensorsFile,
    targets: Mapping[str, torch.Tensor],
    context: WorkerContext,
) -> None:
    """Read a file's tensors into their places, hashing it whole on the way."""
    entries = sorted(source.tensors.values(), key=lambda entry: entry.offset)
    digest = sha256()
    with open_regular(source.path) as raw:
        digest.update(raw.read(min((entry.offset for entry in entries), default=-1)) or b"")
    for entry in entries:
        if context.cancelled():
            raise CancelledStepError(f"loading was ended at {entry.name}")
        target = targets[entry.name]
        in_place = target.device.type == "cpu" and target.is_contiguous()
        host = target if in_place else torch.empty(target.shape, dtype=target.dtype)
        data = _bytes(host)
        source.read_into(entry.name, data)
        digest.update(data)
        if not in_place:
            with torch.no_grad():
                target.copy_(host)
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(
            f"{source.path}: the contents are not those that were saved (SHA-256 "
            f"{digest.hexdigest()}, {MANIFEST} says {file.sha256}), first tensor "
            f"{shown(entries[0].name if entries else '')}: fetch the file again"
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
