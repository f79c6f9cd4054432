"""Tiny models on disk, written by the formats' own libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PARTS = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HIDDEN, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (HIDDEN // 2, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (HIDDEN // 2, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HIDDEN)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
}
OUTSIDE = {
    "model.embed_tokens": ("token_embd", (VOCAB, HIDDEN)),
    "model.norm": ("output_norm", (HIDDEN,)),
    "lm_head": ("output", (VOCAB, HIDDEN)),
}


def random_weights() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(7)
    shapes = {name: shape for name, (_, shape) in OUTSIDE.items()}
    for layer in range(LAYERS):
        shapes.update({f"model.layers.{layer}.{n}": shape for n, (_, shape) in PARTS.items()})
    return {
        f"{name}.weight": numbers.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def to_gguf(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem][0]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part][0]}.weight"


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order: element i of a head's first half beside element i of its second."""
    size = rows.shape[0] // heads
    order = [
        head * size + half * (size // 2) + index
        for head in range(heads)
        for index in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def write_gguf(path: Path, kinds: Mapping[str, str], default: str = "F32") -> dict[str, np.ndarray]:
    """Write the model, a tensor named in ``kinds`` in that type; return what a reader must get."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    expected: dict[str, np.ndarray] = {}
    for name, values in random_weights().items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = paired(values, heads) if heads else values
        matrix = values.ndim > 1
        kind = gguf.GGMLQuantizationType[kinds.get(name, default) if matrix else "F32"]
        raw = gguf.quants.quantize(stored, kind)
        if kind.name == "F16":
            raw = stored.astype(np.float16)
        writer.add_tensor(to_gguf(name), raw, raw_dtype=kind)
        got = gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(values.shape)
        if heads:
            order = paired(np.arange(len(got)), heads)
            restored = np.empty_like(got)
            restored[order] = got
            got = restored
        expected[name] = got
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_folder(folder: Path, dtype: torch.dtype, shards: int = 1, **config) -> dict:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = {n: torch.from_numpy(v).to(dtype) for n, v in random_weights().items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    home = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, folder / file)
        home.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    return tensors


class Disk:
    """The writers above, for tests."""

    gguf = staticmethod(write_gguf)
    folder = staticmethod(write_folder)
    config = CONFIG


@pytest.fixture(scope="session")
def disk() -> type[Disk]:
    return Disk
