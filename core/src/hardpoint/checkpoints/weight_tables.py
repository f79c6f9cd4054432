"""Which tensors of a checkpoint are weights, by their Hugging Face names; for every loader."""

from __future__ import annotations

from collections.abc import Collection

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.llama import hf_name, rotary_heads
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.errors import CheckpointError, UnsupportedModelError


def safetensors_weights(
    checkpoint: SafetensorsCheckpoint, description: ModelDescription, types: Collection[str]
) -> dict[str, TensorEntry]:
    """Return the weights of a folder, in the order of the disk.

    ``types`` are the element types that the caller reads. Raises UnsupportedModelError for another
    one, and for a model that its configuration says is quantised.
    """
    if method := description.hf_config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{description.path}: the weights are quantised ({shown(method)}), which is not "
            f"supported yet; use the original model"
        )
    found = {}
    for file in checkpoint.files:
        for entry in _ordered(file):
            _require_type(file, entry, types)
            found[entry.name] = entry
    return found


def gguf_weights(
    file: GGUFFile, description: ModelDescription, types: Collection[str]
) -> dict[str, TensorEntry]:
    """Return the weights of a GGUF file, in the order of the disk; rows are as the file has them.

    ``types`` are the element and block types that the caller reads. Raises UnsupportedModelError
    for another one, CheckpointError for a tensor that stands for no weight.
    """
    found: dict[str, TensorEntry] = {}
    for entry in _ordered(file):
        _require_type(file, entry, types)
        where = f"{file.path}: tensor {shown(entry.name)}"
        name = hf_name(entry.name)
        if name is None or name in found:
            raise CheckpointError(f"{where} stands for no weight, or for one that is there already")
        heads = rotary_heads(description, name)
        if heads is not None and entry.shape[0] % (2 * heads):
            raise CheckpointError(f"{where} has {entry.shape[0]} rows for {heads} heads")
        found[name] = entry
    return found


def _ordered(file: TensorFile) -> list[TensorEntry]:
    return sorted(file.tensors.values(), key=lambda entry: entry.offset)


def _require_type(file: TensorFile, entry: TensorEntry, types: Collection[str]) -> None:
    if entry.type not in types:
        raise UnsupportedModelError(
            f"{file.path}: tensor {shown(entry.name)} is of type {entry.type}, which is not read "
            f"here; supported: {', '.join(types)}; convert the model to one of them"
        )
