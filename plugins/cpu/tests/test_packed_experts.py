"""A mixture's experts are held packed as other matrices are, and computed so by native programs."""

from __future__ import annotations

import json
import logging

import gguf
import numpy as np
import pytest
import torch
from hardpoint_cpu.native import library
from hardpoint_engine import SamplingParams
from hardpoint_runtime.quantization import form_of
from native_models import PROMPTS, engine, program_threads

available = library.availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason or "")

ONE = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
NEAR = {"int8": 1e-4, "w8a8": 0.4, "w4a8": 0.4}
"""How near logarithms of probabilities are to torch's with the same weights: activations of the
last two are rounded.
"""
EXPERTS = {"mixtral": 5, "qwen2_moe": 6}


def held(llm) -> dict[str, str]:
    """Return matrix of experts -> as what it is held, without having been changed on the way."""

    def find(worker):
        found = {}
        for path, module in worker.get_model_runner().get_model().named_modules():
            for name in ("gate_up", "down") if type(module).__name__ == "Experts" else ():
                form, memory = form_of(module, name), module.get_parameter(name)
                parts = None if form is None else [part.kind for part in form.parts]
                found[f"{path}.{name}"] = parts or str(memory.dtype)
        return found

    return llm.collective_rpc(find)[0]


def scores(llm) -> list[dict[int, float]]:
    """Return of each prompt the likeliest next tokens and how likely they are."""
    results = llm.generate(PROMPTS, ONE)
    return [
        {token: each.logprob for token, each in result.outputs[0].logprobs[0].items()}
        for result in results
    ]


def furthest(found, wanted) -> float:
    """Return by how much the likeliest tokens' logarithms are off."""
    best = [max(each, key=each.get) for each in wanted]
    return max(
        abs(ours.get(token, -np.inf) - theirs[token])
        for ours, theirs, token in zip(found, wanted, best, strict=True)
    )


def taking_all(folder, copy):
    """Return a copy of a mixture whose tokens go to every expert: else what is rounded on the way
    may take a token to another expert, and its numbers anywhere.
    """
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    settings = json.loads((copy / "config.json").read_text())
    settings["num_experts_per_tok"] = EXPERTS[settings["model_type"]]
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "int8"), ("qwen2-moe", "w8a8"), ("mixtral", "w4a8")]
)
def test_a_quantised_mixture_holds_packed_experts(checkpoint, tmp_path, family, kind):
    folder = checkpoint(family) if kind == "int8" else taking_all(checkpoint(family), tmp_path)
    with engine(folder, "on", quantization=kind) as llm:
        stacks = held(llm)
        assert stacks
        assert set(map(tuple, stacks.values())) == {(kind,)}
        assert program_threads(llm)
        found = scores(llm)
    with engine(folder, "auto", quantization=kind, graph_mode="none") as llm:
        assert held(llm) == stacks
        assert program_threads(llm) is None
        wanted = scores(llm)
    assert furthest(found, wanted) <= NEAR[kind]


@pytest.mark.slow
def test_shards_of_a_mixture_hold_packed_experts(checkpoint):
    keys = {"quantization": "int8", "tensor_parallel_size": 2, "executor": "mp"}
    found = {}
    for native, more in (("on", {}), ("auto", {"graph_mode": "none"})):
        with engine(checkpoint("qwen2-moe"), native, **keys, **more) as llm:
            assert set(map(tuple, held(llm).values())) == {("int8",)}
            found[native] = scores(llm)
    assert furthest(found["on"], found["auto"]) <= NEAR["int8"]


HIDDEN, INNER, COUNT, VOCABULARY, HEADS = 64, 96, 5, 97, 4


@pytest.fixture(scope="module")
def mixture_file(tmp_path_factory):
    """Return what writes a GGUF file of a mixture, the stacks of its experts of these types."""

    def write(**kinds: str):
        path = tmp_path_factory.mktemp("gguf") / "mixture.gguf"
        writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(5)
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_expert_count(COUNT)
        writer.add_expert_used_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(HIDDEN // HEADS)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(VOCABULARY - 3))])
        writer.add_token_merges(["a b"])
        writer.add_token_types([1] * VOCABULARY)
        writer.add_eos_token_id(0)
        square = (HIDDEN, HIDDEN)
        for name, shape in {
            "token_embd": (VOCABULARY, HIDDEN), "blk.0.attn_q": square, "blk.0.attn_k": square,
            "blk.0.attn_v": square, "blk.0.attn_output": square,
            "blk.0.ffn_gate_inp": (COUNT, HIDDEN), "blk.0.ffn_gate_exps": (COUNT, INNER, HIDDEN),
            "blk.0.ffn_up_exps": (COUNT, INNER, HIDDEN),
            "blk.0.ffn_down_exps": (COUNT, HIDDEN, INNER),
        }.items():  # fmt: skip
            values = draw.standard_normal(shape, dtype=np.float32) * 0.2
            kind = kinds.get(name.rpartition(".")[2].removesuffix("_exps"), "F32")
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, type_), raw_dtype=type_)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (("Q8_0", "Q8_0", "Q4_0"), [["q8_0"], ["q4_0"]]),
        (("Q8_0", "Q4_1", "Q4_1"), ["torch.float32", ["q4_1"]]),  # one operand: not of two types
    ],
)
def test_stacks_of_experts_stay_as_a_file_has_them(mixture_file, kinds, wanted, caplog):
    path = mixture_file(**dict(zip(("ffn_gate", "ffn_up", "ffn_down"), kinds, strict=True)))
    with caplog.at_level(logging.INFO), engine(path, "on", dtype="auto") as llm:
        assert list(held(llm).values()) == wanted
        told = [each.message for each in caplog.records if "are unpacked" in each.message]
        assert len(told) == sum(isinstance(each, str) for each in wanted)
        assert all(
            "stored as Q4_1, Q8_0 are unpacked (1, the first layers.0.mlp.gate_up)" in message
            for message in told
        )
        assert program_threads(llm)
        found = scores(llm)
    with engine(path, "off", dtype="float32") as llm:
        assert set(held(llm).values()) == {str(torch.float32)}
        assert furthest(found, scores(llm)) <= NEAR["int8"]
