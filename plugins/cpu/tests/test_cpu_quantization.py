"""Weights that are held packed: the same numbers as the packing says, in no more memory."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hardpoint.config import Config
from hardpoint.errors import ConfigError
from hardpoint_cpu.native.packing import pack
from hardpoint_cpu.quantization import W8A8
from hardpoint_engine import LLM, SamplingParams
from hardpoint_runtime.quantization import Piece, Place, form_of
from native_models import PROMPTS

ON = {"native": "auto"}
BITS = {"int8": 10, "w8a8": 10, "w4a8": 6}
"""At most so many bits a number, scales included."""


def start(model, **keys):
    settings = {"threads": 1, **keys.pop("cpu", {})}
    keys = {"max_model_len": 128, "max_num_seqs": 8, "num_kv_blocks": 40, **keys}
    return LLM(str(model), platform="cpu", executor="uni", plugins={"cpu": settings}, **keys)


def matrices(llm):
    """Return module name -> (module, parameter) of all matrices."""

    def find(worker):
        model = worker.get_model_runner().get_model()
        return {
            f"{path}.{name}": (module, name)
            for path, module in model.named_modules()
            for name in getattr(type(module), "packable", ())
        }

    return llm.collective_rpc(find)[0]


@pytest.mark.parametrize("kind", BITS)
def test_a_quantised_model_holds_packed_bytes_and_nothing_else(checkpoint, kind):
    folder = checkpoint("llama", torch.bfloat16)
    with start(folder, dtype="float32") as plain, start(folder, quantization=kind, cpu=ON) as llm:
        dense = matrices(plain)
        for name, (module, parameter) in matrices(llm).items():
            form, memory = form_of(module, parameter), module.get_parameter(parameter)
            wanted = dense[name][0].get_parameter(parameter)
            assert [part.kind for part in form.parts] == [kind]
            assert memory.dtype == torch.uint8
            padded = -(-form.rows // 16) * 16 * -(-form.cols // 64) * 64
            assert memory.nbytes <= padded * BITS[kind] / 8
            numbers = form.dense(memory)
            assert numbers.shape == wanted.shape
            step = 2 ** (8 if kind != "w4a8" else 4) - 2
            assert (numbers - wanted).abs().max() <= 2.1 * wanted.abs().max() / step
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3))
        assert [len(each.outputs[0].token_ids) for each in answers] == [3] * len(PROMPTS)


def test_a_quantisation_without_the_library_is_an_error(checkpoint):
    with pytest.raises(ConfigError, match="native programs are off"):
        start(checkpoint("llama"), quantization="w8a8", cpu={"native": "off"})


def test_a_quantisation_that_is_not_offered_is_named(checkpoint):
    with pytest.raises(ConfigError, match=r"quantization = 'w8a'.*\n?.*w8a8"):
        start(checkpoint("llama"), quantization="w8a")


HIDDEN, INNER, VOCAB = 256, 512, 96
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q4_1", "token_embd": "Q8_0"}
BLOCKS = {"Q4_K": (256, 144), "Q6_K": (256, 210)}


def blocks(kind, shape, draw):
    """Return packed rows of a type: those that the package cannot pack are drawn as they are."""
    if kind not in BLOCKS:
        values = draw.standard_normal(shape, dtype=np.float32) * 0.05
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    numbers, size = BLOCKS[kind]
    raw = draw.integers(0, 256, (shape[0] * shape[1] // numbers, size), dtype=np.uint8)
    scales = {"Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}[kind]
    count = (scales.stop - scales.start) // 2
    raw[:, scales] = np.full((len(raw), count), 2e-4, np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory):
    """Return what writes a GGUF file of one type of matrices, some of others, and their numbers."""

    def write(kind, mixed=None) -> tuple[Path, dict[str, np.ndarray]]:
        path = tmp_path_factory.mktemp("gguf") / f"{kind}.gguf"
        draw, numbers = np.random.default_rng(5), {}
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(HIDDEN // 4)
        tokens = ["a", "b", "ab", *(f"t{index}" for index in range(VOCAB - 3))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_merges(["a b"])
        writer.add_token_types([1] * VOCAB)
        writer.add_eos_token_id(0)
        half = HIDDEN // 2
        for name, shape in {
            "token_embd": (VOCAB, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN),
            "blk.0.attn_k": (half, HIDDEN), "blk.0.attn_v": (half, HIDDEN),
            "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (INNER, HIDDEN),
            "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
        }.items():  # fmt: skip
            own = (mixed or {}).get(name.rpartition(".")[2], kind)
            raw, type_ = blocks(own, shape, draw), gguf.GGMLQuantizationType[own]
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=type_)
            numbers[name.rpartition(".")[2]] = gguf.dequantize(raw, type_).reshape(shape)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, numbers

    return write


def halves(rows, heads):
    """Return rows in the order of Hugging Face models."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_blocks_of_a_gguf_file_stay_packed_exactly(packed_file, kind):
    path, numbers = packed_file(kind)
    with start(path, cpu=ON) as llm:
        found = matrices(llm)
        wanted = {
            "embed.weight": numbers["token_embd"],
            "layers.0.attention.qkv.weight": np.concatenate(
                [halves(numbers["attn_q"], 4), halves(numbers["attn_k"], 2), numbers["attn_v"]]
            ),
            "layers.0.mlp.gate_up.weight": np.concatenate([numbers["ffn_gate"], numbers["ffn_up"]]),
            "layers.0.mlp.down.weight": numbers["ffn_down"],
        }
        for name, values in wanted.items():
            module, parameter = found[name]
            form = form_of(module, parameter)
            assert [part.kind for part in form.parts] == [kind.lower()]
            dense = form.dense(module.get_parameter(parameter)).numpy()
            assert np.abs(dense - values).max() <= 1e-6 * np.abs(values).max()
        held = sum(module.get_parameter(name).nbytes for module, name in found.values())
        assert held <= 1.1 * path.stat().st_size
    assert_alike(path)


NEAR = {"float": 2e-4, "int8": 0.1}
"""How near logarithms of probabilities are, by what weights are multiplied with."""


def assert_alike(path):
    """The packed model's choices are those of the unpacked one, up to rounding of sums, and of
    activations where that is asked for.
    """
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    prompts = [[token % VOCAB for token in prompt] for prompt in PROMPTS]
    with start(path, dtype="float32", cpu={"native": "off"}) as plain:
        wanted = plain.generate(prompts, params)
    apart = dict.fromkeys(NEAR, 0.0)
    for activations in NEAR:
        with start(path, cpu={**ON, "activations": activations}) as llm:
            found = llm.generate(prompts, params)
        for ours, theirs in zip(found, wanted, strict=True):
            (own,), (other,) = ours.outputs[0].logprobs, theirs.outputs[0].logprobs
            best = max(other, key=lambda token: other[token].logprob)
            off = abs(own[best].logprob - other[best].logprob)
            apart[activations] = max(apart[activations], off)
    assert apart["float"] <= NEAR["float"] < apart["int8"] <= NEAR["int8"]


def test_parts_of_one_matrix_may_be_packed_unlike(packed_file):
    path, _ = packed_file("Q4_K", MIXED)
    with start(path, cpu=ON) as llm:
        module, parameter = matrices(llm)["layers.0.attention.qkv.weight"]
        parts = form_of(module, parameter).parts
        assert [(part.kind, part.first, part.rows) for part in parts] == [
            ("q4_k", 0, 384), ("q6_k", 384, 128)
        ]  # fmt: skip
    assert_alike(path)


def test_a_type_that_was_asked_for_unpacks(packed_file):
    path, numbers = packed_file("Q4_0")
    with start(path, dtype="float32", cpu=ON) as llm:
        module, parameter = matrices(llm)["layers.0.mlp.down.weight"]
        weight = module.get_parameter(parameter)
        assert weight.dtype == torch.float32
        assert np.array_equal(weight.numpy(), numbers["ffn_down"])


@pytest.mark.parametrize("kind", BITS)
def test_blocks_of_a_file_are_rounded_without_being_unpacked_by_torch(
    packed_file, kind, monkeypatch
):
    path, numbers = packed_file("Q4_1")
    unpacked = []
    monkeypatch.setattr(
        "hardpoint_runtime.loading.gguf.unpack",
        lambda *args: unpacked.append(args) or pytest.fail("torch unpacks blocks"),
    )
    with start(path, quantization=kind, cpu=ON) as llm:
        module, parameter = matrices(llm)["layers.0.mlp.gate_up.weight"]
        wanted = np.concatenate([numbers["ffn_gate"], numbers["ffn_up"]])
        found = module.get_parameter(parameter).numpy()
        assert np.array_equal(found, pack(wanted, "f32", kind, cols=HIDDEN))
    assert not unpacked


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_of_which_a_shard_has_some_columns_are_unpacked_first(whole):
    pieces = (
        Piece(first=0, rows=32, stored="Q4_1", whole=True),
        Piece(first=32, rows=32, stored="Q4_1", whole=whole),
    )
    place = Place(module="m", parameter="weight", rows=64, cols=128, pieces=pieces, alike=False)
    form = W8A8(Config(), torch.float32).create(place)
    assert form.takes_stored(0, "Q4_1") is whole
    assert not form.takes_stored(0, "Q5_1")
