"""Tiny checkpoints, made byte by byte so that tests can break any part of them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm": (32,),
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "post_attention_layernorm": (32,),
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 32),
        "model.norm.weight": (32,),
    }
    for index in range(2):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        index, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


SCALAR = {4: "<I", 6: "<f", 7: "<?", 10: "<Q"}


def packed(kind: int, value: Any) -> bytes:
    if kind == 8:
        return text(value)
    if kind == 9:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(packed(item, v) for v in values)
    return struct.pack(SCALAR[kind], value)


def make_gguf(
    keys: Sequence[tuple[str, int, Any]],
    tensors: Mapping[str, tuple[Sequence[int], int, bytes]],
    alignment: int = 32,
) -> bytes:
    """Keys are (name, type, value); a tensor is (shape outermost first, type, data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for name, kind, value in keys:
        head += text(name) + struct.pack("<I", kind) + packed(kind, value)
    body = b""
    for name, (shape, kind, data) in tensors.items():
        body += b"\0" * (-len(body) % alignment)
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data
    return head + b"\0" * (-len(head) % alignment) + body


def llama_keys() -> list[tuple[str, int, Any]]:
    return [
        ("general.architecture", 8, "llama"),
        ("llama.block_count", 4, 2),
        ("llama.context_length", 4, 128),
        ("llama.embedding_length", 4, 32),
        ("llama.feed_forward_length", 4, 64),
        ("llama.attention.head_count", 4, 4),
        ("llama.attention.head_count_kv", 4, 2),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("llama.rope.freq_base", 6, 10000.0),
        ("tokenizer.ggml.tokens", 9, (8, ["<s>", "ä", "\u4e16\u754c"])),
        ("tokenizer.ggml.token_type", 9, (4, [3, 1, 1])),
        ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 2),
    ]


def llama_tensors() -> dict[str, tuple[Sequence[int], int, bytes]]:
    found: dict[str, tuple[Sequence[int], int, bytes]] = {}
    for name, shape in llama_shapes().items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        found[gguf_name(name)] = (shape, 0, struct.pack("<f", 0.5) * count)
    return found


def mixture_gguf() -> bytes:
    """A Qwen 3 with experts: tensors that are several weights."""
    keys = [(name.replace("llama.", "qwen3moe."), *rest) for name, *rest in llama_keys()[1:]]
    keys += [
        ("general.architecture", 8, "qwen3moe"),
        ("qwen3moe.expert_count", 4, 4),
        ("qwen3moe.expert_used_count", 4, 2),
        ("qwen3moe.expert_feed_forward_length", 4, 16),
    ]
    tensors = {name: row for name, row in llama_tensors().items() if ".ffn_" not in name}
    shapes = {"attn_q_norm": (8,), "attn_k_norm": (8,), "ffn_norm": (32,), "ffn_gate_inp": (4, 32)}
    shapes |= {"ffn_gate_exps": (4, 16, 32), "ffn_up_exps": (4, 16, 32)}
    shapes |= {"ffn_down_exps": (4, 32, 16)}
    for layer in range(2):
        for name, shape in shapes.items():
            data = struct.pack("<f", 0.5) * math.prod(shape)
            tensors[f"blk.{layer}.{name}.weight"] = (shape, 0, data)
    return make_gguf(keys, tensors)


def factors_gguf() -> bytes:
    """A Llama 3: rotary factors as a tensor (here: none of consequence)."""
    factors = {"rope_freqs.weight": ((4,), 0, struct.pack("<4f", 1, 1, 1, 1))}
    return make_gguf(llama_keys(), factors | llama_tensors())


def make_safetensors(
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    body = b""
    for name, (kind, shape, data) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    return with_header(header, body)


def with_header(header: object, body: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def make_folder(
    folder: Path, config: Mapping[str, Any] | None = None, shards: int = 1, kind: str = "BF16"
) -> Path:
    """Write a tiny Llama as a Hugging Face folder, in so many safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    width = {"BF16": 2, "F16": 2, "F32": 4}[kind]
    tensors = {}
    for name, shape in llama_shapes().items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = (kind, shape, b"\0" * (width * count))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(make_safetensors(tensors))
        return folder
    home: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        home.update(dict.fromkeys(part, file))
        (folder / file).write_bytes(make_safetensors(part))
    index = {"metadata": {"total_size": 0}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Maker:
    """Everything above, for tests."""

    config = CONFIG
    text = staticmethod(text)
    gguf = staticmethod(make_gguf)
    llama_keys = staticmethod(llama_keys)
    llama_tensors = staticmethod(llama_tensors)
    safetensors = staticmethod(make_safetensors)
    with_header = staticmethod(with_header)
    folder: Callable[..., Path] = staticmethod(make_folder)

    mixture_gguf = staticmethod(mixture_gguf)
    factors_gguf = staticmethod(factors_gguf)

    @staticmethod
    def llama_gguf() -> bytes:
        return make_gguf(llama_keys(), llama_tensors())


@pytest.fixture(scope="session")
def make() -> type[Maker]:
    return Maker
