"""What a GGUF file says of its model, in the words of a Hugging Face configuration."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.ggml_types import FLOAT_TYPES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.llama import check_shapes, hf_name
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES: Final = MappingProxyType({"llama": "LlamaForCausalLM"})
"""GGUF's name of an architecture -> the Hugging Face class of the same computation."""
EMBEDDING: Final = "token_embd.weight"


def describe_gguf(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file. Raises CheckpointError or UnsupportedModelError."""
    with GGUFFile(path) as file:
        fields = Fields(path, file.metadata)
        _check_kind(file, fields)
        description = _describe(file, fields)
        _check_tensors(file, description)
    return description


def _check_kind(file: GGUFFile, fields: Fields) -> None:
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the architecture {shown(name)} is not supported in GGUF files; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    refused = {
        "split.count": "a model split over several files; merge it with llama-gguf-split --merge",
        f"{name}.expert_count": "a mixture of experts",
    }
    for key, what in refused.items():
        if fields.integer(key, 0, low=0) > 1:
            raise UnsupportedModelError(f"{file.path}: {key} says {what}, which is not supported")
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModelError(
            f"{file.path}: tensor 'rope_freqs.weight' holds rotary frequency factors, which are "
            f"not supported in GGUF files; use the model's safetensors folder"
        )
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {EMBEDDING!r} is missing")


def _describe(file: GGUFFile, fields: Fields) -> ModelDescription:
    name = str(file.metadata["general.architecture"])
    heads = fields.integer(f"{name}.attention.head_count")
    kv_heads = _kv_heads(fields, f"{name}.attention.head_count_kv", heads)
    hidden = fields.integer(f"{name}.embedding_length")
    head_size = fields.integer(f"{name}.attention.key_length", hidden // heads)
    rotary = fields.integer(f"{name}.rope.dimension_count", head_size)
    if fields.integer(f"{name}.attention.value_length", head_size) != head_size or (
        rotary != head_size
    ):
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
        architecture=ARCHITECTURES[name],
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
        hf_config={**_configuration(file, fields, name), **shape},
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


def _configuration(file: GGUFFile, fields: Fields, name: str) -> dict[str, Any]:
    scaling = fields.text(f"{name}.rope.scaling.type", "none")
    rope = None
    if scaling != "none":
        rope = {
            "rope_type": scaling,
            "factor": fields.real(f"{name}.rope.scaling.factor"),
            "original_max_position_embeddings": fields.integer(
                f"{name}.rope.scaling.original_context_length",
                fields.integer(f"{name}.context_length"),
            ),
        }
    return {
        "model_type": name,
        "architectures": [ARCHITECTURES[name]],
        "hidden_act": "silu",
        "rope_theta": fields.real(f"{name}.rope.freq_base", 10_000.0),
        "rope_scaling": rope,
        "rms_norm_eps": fields.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }


def _stored_dtype(file: GGUFFile) -> str:
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        if len(entry.shape) > 1:  # norms stay float32 in packed and half-precision files alike
            name = FLOAT_TYPES.get(entry.type, "packed")
            sizes[name] = sizes.get(name, 0) + entry.num_bytes
    return "packed" if "packed" in sizes else max(sizes, key=lambda name: sizes[name])


def _check_tensors(file: GGUFFile, description: ModelDescription) -> None:
    unknown = [name for name in file.tensors if hf_name(name) is None]
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: {len(unknown)} tensors belong to no {description.architecture}: "
            f"{some(unknown)}"
        )
    shapes = {hf_name(name) or name: entry.shape for name, entry in file.tensors.items()}
    if len(shapes) != len(file.tensors):
        raise CheckpointError(f"{file.path}: two tensors stand for the same weight")
    check_shapes(file.path, description, shapes)
