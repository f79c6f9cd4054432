"""Tiny models of every architecture and type of GGUF files, named as llama.cpp names them (by the
``gguf`` package's own tables): the same model as the folder it was made from, and as transformers
reads the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
    "norm_topk_prob": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5] * 4,
    "long_factor": [2.0, 4.0] * 4,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9}
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-3": ("llama", "Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("llama", "Mistral", {"sliding_window": 9}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "llama", "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2-yarn": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 24}),
    "qwen2moe": (
        "qwen2moe", "Qwen2Moe",
        {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 48},
    ),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", EXPERTS),
    "phi3": ("phi3", "Phi3", {"sliding_window": 9}),
    "phi3-long": (
        "phi3", "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": 9},
    ),
    "phi3-partly": (
        "phi3", "Phi3",
        {"rope_parameters": PARTLY},
    ),
    "gemma": ("gemma", "Gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", "Gemma2", GEMMA),
    "gemma3": ("gemma3", "Gemma3", GEMMA),
    "gemma3-linear": ("gemma3", "Gemma3", {**GEMMA, "rope_parameters": LINEAR}),
}  # fmt: skip
READ_BY_TRANSFORMERS: dict[str, dict[str, int]] = {
    "llama": {},
    "llama-tied": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen2moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3moe": {"moe_intermediate_size": 768},
    "phi3": {},
    "gemma2": {},
    "gemma3": {},
}
"""Rows, with the sizes that it does not read out of a file, but takes to be its own default."""


def save_folder(name: str, folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Write a row's model as a Hugging Face folder; its tensors, as the files name them."""
    import transformers
    from safetensors.torch import load_file

    family, values = ROWS[name][1], {**COMMON, **ROWS[name][2], **changes}
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(3)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**values))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randint(-64, 64, parameter.shape) / 256)
    made.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return {each: tensor.float().numpy() for each, tensor in tensors.items()}


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored_tensors(architecture: str, config: dict, tensors) -> dict[str, np.ndarray]:
    """Name and lay out the tensors as llama.cpp's converter does."""
    import gguf

    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if ".experts." in stem:
            block, _, rest = stem.partition(".experts.")
            number, _, part = rest.partition(".")
            stem = f"{block}.experts.{part}"
            found.setdefault(f"{names.get_name(stem)}.{suffix}", {})[int(number)] = values
            continue
        stored = laid_out(architecture, config, stem, values)
        found[f"{names.get_name(stem)}.{suffix}"] = stored
    return {
        name: np.stack([values[i] for i in range(len(values))]) if isinstance(values, dict)
        else values
        for name, values in found.items()
    }  # fmt: skip


def laid_out(architecture: str, config: dict, stem: str, values: np.ndarray) -> np.ndarray:
    if architecture == "llama" and ".q_proj" in stem:
        return paired(values, config["num_attention_heads"])
    if architecture == "llama" and ".k_proj" in stem:
        return paired(values, config["num_key_value_heads"])
    if architecture.startswith("gemma") and stem.endswith("norm"):
        return values + 1
    return values[0] if stem.endswith("shared_expert_gate") else values


def write_gguf(path: Path, name: str, tensors, kinds=None, tables=None) -> None:
    """Write a row's file; ``kinds`` gives the type of a matrix by its GGUF name (F32), ``tables``
    is a SentencePiece vocabulary.
    """
    import gguf

    architecture, _, values = ROWS[name]
    config = json.loads((path.parent / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if tables is not None:
        writer.add_tokenizer_model("llama")
        writer.add_unk_token_id(0)
        for key, value in tables.items():
            writer.add_array(f"tokenizer.ggml.{key}", value)
    if architecture == "phi3" and config.get("sliding_window") is None:
        writer.add_sliding_window(0)  # as the converter does for Phi-4
    for key, add in (
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(key) is not None:
            add(config[key])
    for stored_name, stored in stored_tensors(architecture, config, tensors).items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(stored_name, "F32")]
        writer.add_tensor(stored_name, packed(stored, kind), raw_dtype=kind)
    for factors, values in rope_factors(rope).items():
        writer.add_tensor(factors, np.array(values, np.float32))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("longrope", "yarn"):
        original = "original_max_position_embeddings"
        writer.add_rope_scaling_orig_ctx_len(rope.get(original) or config[original])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_factors(rope: dict) -> dict[str, list[float]]:
    if rope["rope_type"] == "longrope":
        return {
            "rope_factors_long.weight": rope["long_factor"],
            "rope_factors_short.weight": rope["short_factor"],
        }
    if rope["rope_type"] != "llama3":
        return {}
    factors = []
    for index in range(0, 16, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / 16)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1 if wavelength < high else rope["factor"] if wavelength > low else between)
    return {"rope_freqs.weight": factors}


def packed(values: np.ndarray, kind) -> np.ndarray:
    """Pack numbers; K-blocks, which the package does not pack, are random with sane scales."""
    import gguf

    if kind.name == "F16":
        return values.astype(np.float16)
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quants.quantize(values, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    numbers = np.random.default_rng(values.size)
    raw = numbers.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    scales = numbers.uniform(1e-4, 3e-4, (len(raw), 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        raw[:, 208:] = scales[:, :2]
    else:
        raw[:, :4] = scales
    return raw.reshape(*values.shape[:-1], -1)


def our_weights(path: Path) -> dict[str, torch.Tensor]:
    from hardpoint.checkpoints import read_description
    from hardpoint_runtime.loading import open_weights

    with open_weights(read_description(path)) as weights:
        return dict(weights.iterate(torch.float32))


@pytest.mark.parametrize("name", ROWS)
def test_the_file_is_the_model_of_the_folder(tmp_path, name):
    from hardpoint.checkpoints import read_description
    from hardpoint.checkpoints.decoder_architectures import decoder_config

    tensors = save_folder(name, tmp_path)
    write_gguf(tmp_path / "m.gguf", name, tensors)
    ours, theirs = read_description(tmp_path / "m.gguf"), read_description(tmp_path)
    same = {"path": theirs.path, "format": theirs.format, "hf_config": theirs.hf_config}
    assert evolve(ours, **same) == theirs
    config, expected = decoder_config(ours), decoder_config(theirs)
    if expected is not None:
        assert config == evolve(expected, norm_eps=config.norm_eps)
        assert config.norm_eps == pytest.approx(expected.norm_eps)
    got = our_weights(tmp_path / "m.gguf")
    assert set(got) == set(tensors)
    for each, values in tensors.items():
        assert np.array_equal(got[each].numpy(), values), each


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_the_file_is_what_transformers_reads(tmp_path, name):
    import transformers

    tensors = save_folder(name, tmp_path, **READ_BY_TRANSFORMERS[name])
    write_gguf(tmp_path / "m.gguf", name, tensors)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    state, got = model.state_dict(), our_weights(tmp_path / "m.gguf")
    got = merged(got)
    for each, tensor in state.items():
        if each == "lm_head.weight" and each not in got:
            continue
        assert torch.equal(got[each], tensor), each


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts as transformers keeps them in memory: gate above up, and down."""
    found, parts = {}, {}
    for name, tensor in weights.items():
        block, expert, rest = name.partition(".experts.")
        if not expert:
            found[name] = tensor
            continue
        number, part = rest.split(".")[:2]
        parts.setdefault(f"{block}.experts", {}).setdefault(part, {})[int(number)] = tensor
    for block, three in parts.items():
        stack = {part: torch.stack([of[i] for i in range(len(of))]) for part, of in three.items()}
        gate_up = torch.cat((stack["gate_proj"], stack["up_proj"]), dim=1)
        found |= {f"{block}.gate_up_proj": gate_up, f"{block}.down_proj": stack["down_proj"]}
    return found


@pytest.mark.parametrize(
    "kind",
    ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "mixed"],
)
def test_every_type_is_what_transformers_reads(tmp_path, kind):
    """Whole models; ``mixed`` as a Q4_K_M file is: most Q4_K, some Q6_K, norms F32."""
    import transformers

    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    tensors = save_folder("llama", tmp_path, **wide)
    matrices = [
        name
        for name, values in stored_tensors("llama", COMMON | wide, tensors).items()
        if values.ndim > 1
    ]
    few = ("output.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")
    kinds = {
        name: kind if kind != "mixed" else "Q6_K" if name in few else "Q4_K" for name in matrices
    }
    write_gguf(tmp_path / "m.gguf", "llama", tensors, kinds)
    (tmp_path / "model.safetensors").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    got = our_weights(tmp_path / "m.gguf")
    assert set(got) == set(model.state_dict())
    for each, tensor in model.state_dict().items():
        assert torch.equal(got[each].view(torch.int32), tensor.view(torch.int32)), each


def test_a_single_file_answers_as_transformers_does(tmp_path):
    """Description, weights of mixed K-quants and a SentencePiece vocabulary, all out of one file;
    greedy ids and text.
    """
    import transformers
    from hardpoint_engine import LLM, SamplingParams

    wide = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 400}
    tensors = save_folder("llama", tmp_path, **wide)
    few = ("output.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight")
    kinds = {
        name: "Q6_K" if name in few else "Q4_K"
        for name, values in stored_tensors("llama", COMMON | wide, tensors).items()
        if values.ndim > 1
    }
    write_gguf(tmp_path / "m.gguf", "llama", tensors, kinds, tokenizer_tables(400))
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    prompt = "in a hole <0x41>\n lived 日本"
    source = {"gguf_file": "m.gguf"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **source
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, **source)
    ids = tokenizer(prompt).input_ids
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=24, pad_token_id=0
    )[0, len(ids) :].tolist()
    with LLM(
        model=str(tmp_path / "m.gguf"), platform="cpu", executor="uni", dtype="float32",
        num_kv_blocks=16,
    ) as llm:  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (result,) = llm.generate([prompt], greedy)
    assert list(result.prompt_token_ids) == ids
    assert list(result.outputs[0].token_ids) == expected
    assert result.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)


def tokenizer_tables(size: int) -> dict[str, list]:
    """A SentencePiece vocabulary: bytes, letters, pairs, and filling."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdefghijklmnopqrstuvwxyz", "▁a", "in", "▁l", "ho", "le", "▁ho", "▁hole", "日"]
    kinds = [2, 3, 3] + [6] * 256
    tokens += [f"▁x{index}" for index in range(size - len(tokens))]
    kinds += [1] * (size - len(kinds))
    return {"tokens": tokens, "token_type": kinds, "scores": [-float(i) for i in range(size)]}
