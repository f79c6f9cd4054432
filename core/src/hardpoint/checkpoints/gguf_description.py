"""What a GGUF file says of its model, in the words of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hardpoint.checkpoints.decoder_tensors import check_size, check_tensors
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.gguf import MOST_TENSORS, GGUFFile
from hardpoint.checkpoints.gguf_architectures import (
    NAMES,
    WINDOW,
    GGUFArchitecture,
    architecture_of,
)
from hardpoint.checkpoints.gguf_rotary import rotary_scaling
from hardpoint.checkpoints.tables import FLOAT_TYPES, shown, some
from hardpoint.checkpoints.weight_tables import named_parts
from hardpoint.errors import CheckpointError, UnsupportedModelError

EMBEDDING: Final = "token_embd.weight"


def describe_gguf(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file. Raises CheckpointError or UnsupportedModelError."""
    with GGUFFile(path) as file:
        fields = Fields(path, file.metadata)
        architecture = _architecture(file, fields)
        description = _describe(file, fields, architecture)
        _check_tensors(file, architecture, description)
    return description


def _architecture(file: GGUFFile, fields: Fields) -> GGUFArchitecture:
    name = fields.text("general.architecture")
    architecture = architecture_of(file.metadata)
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path}: the architecture {shown(name)} is not supported in GGUF files; "
            f"supported: {', '.join(NAMES)}"
        )
    refused = {
        "split.count": "a model split over several files; merge it with llama-gguf-split --merge",
    }
    if not architecture.merged:
        refused[f"{name}.expert_count"] = "a mixture of experts"
    if WINDOW not in architecture.whole:
        refused[f"{name}.{WINDOW}"] = "a window in layers"
    for key, what in refused.items():
        if fields.integer(key, 0, low=0) > 1:
            raise UnsupportedModelError(f"{file.path}: {key} says {what}, which is not supported")
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {EMBEDDING!r} is missing")
    return architecture


def _describe(file: GGUFFile, fields: Fields, architecture: GGUFArchitecture) -> ModelDescription:
    name = str(file.metadata["general.architecture"])
    heads = fields.integer(f"{name}.attention.head_count")
    kv_heads = _kv_heads(fields, f"{name}.attention.head_count_kv", heads)
    hidden = fields.integer(f"{name}.embedding_length")
    head_size = fields.integer(f"{name}.attention.key_length", hidden // heads)
    rotary = fields.integer(f"{name}.rope.dimension_count", head_size)
    partly = rotary != head_size and not (architecture.partly_rotated and rotary < head_size)
    if partly or fields.integer(f"{name}.attention.value_length", head_size) != head_size:
        raise UnsupportedModelError(
            f"{file.path}: keys of {head_size}, of which {rotary} are rotated, and values of "
            f"another size are not supported; all three must be equal"
        )
    vocab = file.tensors[EMBEDDING].shape[0]
    if fields.integer(f"{name}.vocab_size", vocab) != vocab:
        raise fields.fail(
            f"{name}.vocab_size", file.metadata[f"{name}.vocab_size"], f"{vocab}, as {EMBEDDING} is"
        )
    shape: dict[str, Any] = {
        "num_hidden_layers": fields.integer(f"{name}.block_count", high=10_000),
        "hidden_size": hidden,
        "intermediate_size": fields.integer(f"{name}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab,
        "max_position_embeddings": fields.integer(f"{name}.context_length"),
    }
    bos = fields.token_ids("tokenizer.ggml.bos_token_id", vocab)
    eos = fields.token_ids("tokenizer.ggml.eos_token_id", vocab)
    turn = fields.token_ids("tokenizer.ggml.eot_token_id", vocab)
    ends = tuple(dict.fromkeys((*(eos or ()), *(turn or ()))))
    return ModelDescription(
        path=file.path,
        format="gguf",
        architecture=architecture.hf_class,
        num_layers=shape["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=shape["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        context_length=shape["max_position_embeddings"],
        stored_dtype=_stored_dtype(file),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=ends,
        hf_config={**_configuration(file, fields, architecture, shape), **shape},
    )


def _kv_heads(fields: Fields, key: str, heads: int) -> int:
    value = fields.values.get(key)
    if isinstance(value, tuple):  # one number a layer
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{fields.path}: {key} differs between layers, which is not supported"
            )
        fields = Fields(fields.path, {key: value[0]})
    count = fields.integer(key, heads, high=heads)
    if heads % count:
        raise fields.fail(key, count, f"a divisor of the {heads} attention heads")
    return count


def _configuration(
    file: GGUFFile, fields: Fields, architecture: GGUFArchitecture, shape: Mapping[str, Any]
) -> dict[str, Any]:
    name = str(file.metadata["general.architecture"])
    biased = "blk.0.attn_q.bias" in file.tensors and not architecture.implied_bias
    found: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.hf_class],
        "hidden_act": "silu",
        "rope_theta": fields.real(f"{name}.rope.freq_base", 10_000.0),
        "rms_norm_eps": fields.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        **architecture.fixed,
    }
    size = fields.integer(f"{name}.rope.dimension_count", shape["head_dim"])
    if size != shape["head_dim"]:
        found["partial_rotary_factor"] = size / shape["head_dim"]
    found["rope_scaling"] = rotary_scaling(file, fields, theta=found["rope_theta"], size=size)
    for key, hf_key in architecture.whole.items():
        if f"{name}.{key}" in fields.values:
            value = fields.integer(f"{name}.{key}", low=0)
            found[hf_key] = None if key == WINDOW and value == 0 else value
    for key, hf_key in architecture.real.items():
        if f"{name}.{key}" in fields.values:
            found[hf_key] = fields.real(f"{name}.{key}")
    if architecture.width_scaled_depth is not None:
        deep = shape["num_hidden_layers"] == architecture.width_scaled_depth
        by_width = shape["hidden_size"] // shape["num_attention_heads"]
        found["query_pre_attn_scalar"] = by_width if deep else shape["head_dim"]
    return found


def _stored_dtype(file: GGUFFile) -> str:
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        if len(entry.shape) > 1:  # norms stay float32 in packed and half-precision files alike
            name = FLOAT_TYPES.get(entry.type, "packed")
            sizes[name] = sizes.get(name, 0) + entry.num_bytes
    return "packed" if "packed" in sizes else max(sizes, key=lambda name: sizes[name])


def _check_tensors(
    file: GGUFFile, architecture: GGUFArchitecture, description: ModelDescription
) -> None:
    """Refuse a description that its file belies, before anything of its size is allocated."""
    unknown = [
        name
        for name in file.tensors
        if name not in architecture.beside and architecture.hf_name(name) is None
    ]
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: {len(unknown)} tensors belong to no {description.architecture}: "
            f"{some(unknown)}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in file.tensors.values():
        if entry.name not in architecture.beside:
            for name, part in named_parts(file.path, architecture, entry):
                if name in shapes:
                    raise CheckpointError(f"{file.path}: two tensors stand for the same weight")
                shapes[name] = part.shape
                if len(shapes) > MOST_TENSORS:
                    raise CheckpointError(f"{file.path}: more than {MOST_TENSORS} weights")
    if not check_tensors(description, shapes):
        check_size(description, sum(entry.num_bytes for entry in file.tensors.values()))
