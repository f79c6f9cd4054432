"""What a Hugging Face folder says of its model. No code of the folder is looked at, let alone run.

References to code (``auto_map`` and its like) are dropped: an architecture is a name that this
program or a plugin knows, or it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES, HEAD_SIZES
from hardpoint.checkpoints.decoder_tensors import check_size, check_tensors
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.documents import read_object
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.files import contained
from hardpoint.checkpoints.float8 import is_beside_weights, scheme_of
from hardpoint.checkpoints.rotary import rope_table
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.checkpoints.tables import FLOAT_TYPES, TensorEntry
from hardpoint.errors import CheckpointError, UnsupportedModelError

LARGEST_CONFIG: Final = 16 << 20
CODE_KEYS: Final = ("auto_map", "custom_pipelines", "trust_remote_code", "custom_generate")
NEEDED: Final = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
CLASS_NAME: Final = re.compile(r"[A-Za-z]\w{0,127}", re.ASCII)
LLAMA: Final = "LlamaForCausalLM"


def describe_folder(folder: Path, *, weights: bool = True) -> ModelDescription:
    """Describe the model in a folder with a config.json and safetensors files.

    With ``weights`` the files' tables are read and checked against the configuration too. Raises
    CheckpointError or UnsupportedModelError.
    """
    path = contained(folder, "config.json")
    if not path.exists():
        raise CheckpointError(
            f"{folder}: there is no config.json in the folder; a model is a folder with one and "
            f"safetensors files, or a GGUF file"
        )
    values = {
        key: value
        for key, value in read_object(path, LARGEST_CONFIG).items()
        if key not in CODE_KEYS
    }
    fields = Fields(path, values)
    _architecture(fields)
    if weights:
        with SafetensorsCheckpoint(folder) as checkpoint:
            tensors = checkpoint.tensors
        stored = _stored_dtype(tensors)
    else:
        tensors, stored = {}, _declared_dtype(fields)
    description = from_configuration(folder, fields, stored)
    if weights:
        _check_tensors(folder, description, tensors)
    return description


def _architecture(fields: Fields) -> str:
    value = fields.values.get("architectures")
    names = value if isinstance(value, list) else []
    if not names or not isinstance(names[0], str) or not CLASS_NAME.fullmatch(names[0]):
        raise fields.fail("architectures", value, f"a list of class names, such as {LLAMA}")
    missing = [key for key in NEEDED if fields.values.get(key) is None]
    if missing:
        raise UnsupportedModelError(
            f"{fields.path}: {names[0]} is described without {', '.join(missing)}, so its shape is "
            f"not known here; supported: {', '.join(ARCHITECTURES)}, and what is configured alike"
        )
    return names[0]


def from_configuration(folder: Path, fields: Fields, stored_dtype: str) -> ModelDescription:
    """Describe the model that ``fields``, the keys of a config.json, speak of; its files are in
    ``folder``. Raises CheckpointError or UnsupportedModelError.
    """
    architecture = _architecture(fields)
    heads = fields.integer("num_attention_heads", high=1 << 16)
    hidden = fields.integer("hidden_size", high=1 << 24)
    kv_heads = fields.integer("num_key_value_heads", heads, high=heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    head = HEAD_SIZES.get(architecture)
    if fields.values.get("head_dim") is None and head is None and hidden % heads:
        raise fields.fail("hidden_size", hidden, f"a multiple of {heads} attention heads")
    vocab = fields.integer("vocab_size", high=1 << 28)
    generation = _generation(folder)
    eos = generation.token_ids("eos_token_id", vocab)
    if eos is None:
        eos = fields.token_ids("eos_token_id", vocab)
    bos = fields.token_ids("bos_token_id", vocab)
    return ModelDescription(
        path=folder,
        format="safetensors",
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers", high=10_000),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", high=1 << 24),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=fields.integer("head_dim", head or hidden // heads, high=1 << 16),
        vocab_size=vocab,
        context_length=fields.integer("max_position_embeddings"),
        stored_dtype=stored_dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos or (),
        hf_config={**fields.values, **(_numbers(fields) if architecture == LLAMA else {})},
    )


def _numbers(fields: Fields) -> dict[str, Any]:
    """Check what a Llama is built from, and bring its older and newer spellings to one."""
    return {
        **_rotary(fields),
        "rms_norm_eps": fields.real("rms_norm_eps", 1e-6),
        "hidden_act": fields.text("hidden_act", "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _rotary(fields: Fields) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling`` (None: plain) from whichever keys hold them."""
    _, rope = rope_table(fields)
    if any(isinstance(value, dict) for value in rope.values.values()):
        return {}  # one table for each kind of layer: for the model that knows them
    for part in (fields, rope):
        if part.real("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{fields.path}: partial_rotary_factor is {part.values['partial_rotary_factor']}; "
                f"heads that are rotated in part are not supported"
            )
    kind = rope.text("rope_type") or rope.text("type") or "default"
    home = fields if fields.values.get("rope_theta") is not None else rope
    return {
        "rope_theta": home.real("rope_theta", 10_000.0),
        "rope_scaling": None if kind == "default" else {**rope.values, "rope_type": kind},
    }


def _generation(folder: Path) -> Fields:
    path = contained(folder, "generation_config.json")
    return Fields(path, read_object(path, LARGEST_CONFIG) if path.exists() else {})


def _declared_dtype(fields: Fields) -> str:
    return fields.text("dtype") or fields.text("torch_dtype") or "float32"


def _stored_dtype(tensors: Mapping[str, TensorEntry]) -> str:
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        name = FLOAT_TYPES.get(entry.type, "packed")
        sizes[name] = sizes.get(name, 0) + entry.num_bytes
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _check_tensors(
    folder: Path, description: ModelDescription, tensors: Mapping[str, TensorEntry]
) -> None:
    """Refuse a configuration that its files belie, before anything of its size is allocated."""
    try:
        scaled = scheme_of(description) is not None
    except UnsupportedModelError:  # here; a plugin's loader may read it
        check_size(description, sum(entry.num_bytes for entry in tensors.values()))
        return
    shapes = {
        name: entry.shape
        for name, entry in tensors.items()
        if not (scaled and is_beside_weights(name))
    }
    if not check_tensors(description, shapes):
        check_size(description, sum(entry.num_bytes for entry in tensors.values()))
