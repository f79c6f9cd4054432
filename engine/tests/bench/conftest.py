"""A small model with a tokenizer, as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 128, 4, 2, 2


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> Path:
    """A Llama of two layers, float32, with a byte-level vocabulary."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|start|>", *alphabet, "th"]
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    numbers = np.random.default_rng(7)
    matrices = {
        "token_embd": (len(tokens), HIDDEN),
        **{
            f"blk.{layer}.{name}": shape
            for layer in range(LAYERS)
            for name, shape in {
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (HIDDEN // 2, HIDDEN),
                "attn_v": (HIDDEN // 2, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
            }.items()
        },
    }
    for name, shape in matrices.items():
        values = numbers.standard_normal(shape, dtype=np.float32) * 0.1
        writer.add_tensor(f"{name}.weight", values)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
