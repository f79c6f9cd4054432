"""From what a user wrote as model to its description: what kind of file it is, and its reader."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import evolve

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.files import contained, open_regular
from hardpoint.checkpoints.folder_description import describe_folder
from hardpoint.checkpoints.gguf import MAGIC
from hardpoint.checkpoints.gguf_description import describe_gguf
from hardpoint.checkpoints.safetensors import INDEX, SINGLE
from hardpoint.checkpoints.sharded_state import (
    SHARDED_STATE,
    describe_sharded_state,
    has_manifest,
)
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CheckpointError

FORMATS: Final = ("auto", "safetensors", "gguf", "sharded_state", "dummy")
DUMMY: Final = "dummy"


def read_description(model: str | Path, load_format: str = "auto") -> ModelDescription:
    """Describe a model from its files. Called in the driver, before anything is started.

    ``model`` is a Hugging Face folder, a GGUF file, a folder with one GGUF file, or one with a
    sharded state. ``load_format`` decides where ``auto`` would; with ``dummy`` the weights are not
    looked at and the description's ``format`` is ``dummy``; then the model may also be the word
    ``dummy``, a tiny shape of its own over 256 bytes. Raises CheckpointError, and
    UnsupportedModelError for an unknown architecture.
    """
    if load_format not in FORMATS:
        raise CheckpointError(
            f"load_format {shown(load_format)} is unknown; known: {', '.join(FORMATS)}"
        )
    try:
        return _describe(expanded(model), load_format)
    except OSError as error:
        raise unreadable(model, error) from error


def expanded(path: str | Path) -> Path:
    """Return ``path`` with its ``~`` replaced; raise CheckpointError for a user without a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{shown(str(path))}: {error}") from error


def unreadable(path: str | Path, error: OSError) -> CheckpointError:
    """Return the error for a path that the system refuses to look at or to read."""
    return CheckpointError(f"{shown(str(path))}: cannot be read: {error.strerror or error}")


def _describe(path: Path, load_format: str) -> ModelDescription:
    if load_format == DUMMY:
        return _describe_dummy(path)
    if not path.exists():
        raise CheckpointError(_nothing_at(path))
    if path.is_dir():
        return _describe_directory(path, load_format)
    if load_format in ("safetensors", SHARDED_STATE) or not _is_gguf(path):
        raise CheckpointError(
            f"{path}: this is a file, and not a GGUF file; a safetensors model is given as its "
            f"folder, the one with config.json"
        )
    return describe_gguf(path)


def _describe_directory(folder: Path, load_format: str) -> ModelDescription:
    if load_format == SHARDED_STATE or (load_format == "auto" and _has_only_shards(folder)):
        return describe_sharded_state(folder)
    if load_format != "gguf" and (folder / "config.json").exists():
        return describe_folder(folder)
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if load_format == "safetensors" or (load_format == "auto" and not files):
        return describe_folder(folder)  # which says what is missing
    if len(files) != 1:
        found = f"{len(files)} GGUF files ({some(files)})" if files else "no GGUF file"
        raise CheckpointError(f"{folder}: there is {found} in the folder; give the file's own path")
    return describe_gguf(contained(folder, files[0]))


def _has_only_shards(folder: Path) -> bool:
    whole = (contained(folder, name).exists() for name in (SINGLE, INDEX))
    return has_manifest(folder) and not any(whole)


def _is_gguf(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(4) == MAGIC or path.suffix == ".gguf"


def _nothing_at(path: Path) -> str:
    text = f"{path}: there is no such file or folder"
    if path.name == DUMMY:
        return f"{text}; for the built-in shape without weights set load_format to dummy"
    if len(path.parts) == 2 and not path.is_absolute():
        return (
            f"{text}; models are not fetched by name: fetch {path} first, for example with "
            f"`hf download {path}`, and give the folder"
        )
    return f"{text}; give the folder of a Hugging Face model or a GGUF file"


def _describe_dummy(path: Path) -> ModelDescription:
    if path.exists():
        if path.is_dir() and (path / "config.json").exists():
            described = describe_folder(path, weights=False)
        elif path.is_dir():
            described = _describe_directory(path, "auto")
        else:
            described = describe_gguf(path)
        return evolve(described, format=DUMMY)
    if str(path) != DUMMY:
        raise CheckpointError(_nothing_at(path))
    return ModelDescription(
        path=path,
        format=DUMMY,
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=256,
        context_length=4096,
        stored_dtype="float32",
        hf_config={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
        },
    )
