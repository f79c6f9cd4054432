"""Which tensors of a checkpoint are weights, by their Hugging Face names; for every loader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.float8 import Scale, is_beside_weights, scale_of, scheme_of
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.gguf_architectures import GGUFArchitecture, architecture_of
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.errors import CheckpointError, UnsupportedModelError

MOST_EXPERTS: Final = 1 << 12


@frozen(kw_only=True)
class StoredWeight:
    """Where a weight lies, and what is to be done with its numbers after they are unpacked.

    ``entry`` says which bytes, and has the weight's shape; its ``name`` is that in the file, of
    which it may be a part (one expert of a stack). ``rotary_heads``: how many heads the rows hold,
    if each head's are stored in pairs. ``less_one``: one is to be taken off. ``scale``: what the
    numbers are to be multiplied by.
    """

    entry: TensorEntry
    rotary_heads: int | None = None
    less_one: bool = False
    scale: Scale | None = None


def safetensors_weights(
    checkpoint: SafetensorsCheckpoint, description: ModelDescription, types: Collection[str]
) -> dict[str, StoredWeight]:
    """Return the weights of a folder, in the order of the disk.

    ``types`` are the element types that the caller reads. Raises UnsupportedModelError for another
    one, and for a model that is quantised in a way that is not known.
    """
    scheme = scheme_of(description)
    tensors = checkpoint.tensors
    found = {}
    for file in checkpoint.files:
        for entry in _ordered(file):
            if scheme is not None and is_beside_weights(entry.name):
                continue
            _require_type(file, entry, types)
            scale = None if scheme is None else scale_of(file.path, entry, tensors, scheme)
            found[entry.name] = StoredWeight(entry=entry, scale=scale)
    return found


def gguf_weights(
    file: GGUFFile, description: ModelDescription, types: Collection[str]
) -> dict[str, StoredWeight]:
    """Return the weights of a GGUF file, in the order of the disk; rows are as the file has them.

    ``types`` are the element and block types that the caller reads. Raises UnsupportedModelError
    for another one, CheckpointError for a tensor that stands for no weight.
    """
    architecture = architecture_of(file.metadata)
    if architecture is None:
        raise UnsupportedModelError(f"{file.path}: the file is of another architecture now")
    found: dict[str, StoredWeight] = {}
    for whole in _ordered(file):
        if whole.name in architecture.beside:
            continue
        _require_type(file, whole, types)
        where = f"{file.path}: tensor {shown(whole.name)}"
        for name, entry in named_parts(file.path, architecture, whole):
            if name in found:
                raise CheckpointError(f"{where} stands for a weight that is there already")
            heads = _rotary_heads(architecture, description, name)
            if heads is not None and entry.shape[0] % (2 * heads):
                raise CheckpointError(f"{where} has {entry.shape[0]} rows for {heads} heads")
            norm = architecture.norms_plus_one and name.endswith("norm.weight")
            found[name] = StoredWeight(entry=entry, rotary_heads=heads, less_one=norm)
    return found


def named_parts(
    path: Path, architecture: GGUFArchitecture, entry: TensorEntry
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the weights that a tensor of a GGUF file is, each with its bytes and shape: one, or one
    for each expert. Raises UnsupportedModelError if it is none, CheckpointError for an impossible
    stack of experts.
    """
    name = architecture.hf_name(entry.name)
    if name is None:
        raise UnsupportedModelError(
            f"{path}: tensor {shown(entry.name)} belongs to no {architecture.hf_class}"
        )
    if "{}" not in name:
        if entry.name.split(".")[-2] in architecture.row_vectors and len(entry.shape) == 1:
            entry = evolve(entry, shape=(1, *entry.shape))
        yield name, entry
        return
    count, shape = entry.shape[0], entry.shape[1:]
    if len(shape) != 2 or count > MOST_EXPERTS:
        raise CheckpointError(
            f"{path}: tensor {shown(entry.name)} has shape {list(entry.shape)}; the experts of a "
            f"layer are a stack of at most {MOST_EXPERTS} matrices"
        )
    size = entry.num_bytes // count
    for index in range(count):
        offset = entry.offset + index * size
        yield name.format(index), evolve(entry, shape=shape, offset=offset, num_bytes=size)


def _rotary_heads(
    architecture: GGUFArchitecture, description: ModelDescription, name: str
) -> int | None:
    if not architecture.rotary_pairs:
        return None
    if ".self_attn.q_proj." in name:
        return description.num_heads
    return description.num_kv_heads if ".self_attn.k_proj." in name else None


def _ordered(file: TensorFile) -> list[TensorEntry]:
    return sorted(file.tensors.values(), key=lambda entry: entry.offset)


def _require_type(file: TensorFile, entry: TensorEntry, types: Collection[str]) -> None:
    if entry.type not in types:
        raise UnsupportedModelError(
            f"{file.path}: tensor {shown(entry.name)} is of type {entry.type}, which is not read "
            f"here; supported: {', '.join(types)}; convert the model to one of them"
        )
