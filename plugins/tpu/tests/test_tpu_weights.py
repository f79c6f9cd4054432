"""Weights out of files, spread over devices, and whole again: bit for bit."""

from __future__ import annotations

import json
import struct

import jax
import numpy as np
import pytest
from hardpoint.checkpoints import WeightSource, read_description
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.float8 import FLOAT8
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.unpacking import UNPACKERS
from hardpoint.errors import CancelledStepError, CheckpointError, UnsupportedModelError
from hardpoint.records import Offer
from hardpoint_tpu.packed import (
    PLAIN,
    pairs_to_halves,
    unpack,
    widen_bfloat16,
)
from hardpoint_tpu.params import all_recipes, load_params, needed_shapes, whole_tensors
from hardpoint_tpu.programs import make_mesh
from hardpoint_tpu.shape import ModelShape
from hardpoint_tpu.weights import RandomSource, open_weights


def test_q8_0_is_scale_times_bytes():
    rng = np.random.default_rng(0)
    blocks, expected = [], []
    for _ in range(9):
        scale, numbers = np.float16(rng.normal()), rng.integers(-128, 128, 32)
        blocks.append(struct.pack("<e32b", scale, *numbers))
        expected.append([float(scale) * int(number) for number in numbers])
    raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(9, 34)
    assert unpack("Q8_0", raw).tolist() == np.asarray(expected, np.float32).tolist()


def test_q4_1_is_scale_times_nibbles_plus_minimum():
    rng = np.random.default_rng(1)
    blocks, expected = [], []
    for _ in range(9):
        scale, least = np.float16(rng.normal()), np.float16(rng.normal())
        numbers = rng.integers(0, 16, 32)
        packed = [
            int(low) | int(high) << 4 for low, high in zip(numbers[:16], numbers[16:], strict=True)
        ]
        blocks.append(struct.pack("<ee16B", scale, least, *packed))
        row = np.float32(scale) * numbers.astype(np.float32) + np.float32(least)
        expected.append(row.tolist())
    raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(9, 20)
    assert unpack("Q4_1", raw).tolist() == expected


@pytest.mark.parametrize("kind", sorted(UNPACKERS))
def test_every_block_type_is_unpacked_as_the_reference_does(kind):
    quants = pytest.importorskip("gguf").quants
    elements, size = next(
        (block.elements, block.num_bytes) for block in BLOCK_TYPES.values() if block.name == kind
    )
    raw = np.random.default_rng(5).integers(0, 256, (301, size), dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # some scales are no numbers
        expected = quants.dequantize(raw.reshape(-1), quants.GGMLQuantizationType[kind])
        got = unpack(kind, raw)
    assert got.shape == (301, elements)
    assert got.dtype == np.float32
    assert np.array_equal(got.reshape(-1), expected, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(FLOAT8))
def test_eight_bit_numbers(kind):
    dtype = {"F8_E4M3": jax.numpy.float8_e4m3fn, "F8_E5M2": jax.numpy.float8_e5m2}[kind]
    raw = np.arange(256, dtype=np.uint8)
    expected = raw.view(dtype).astype(np.float32)
    assert np.array_equal(PLAIN[kind](raw), expected, equal_nan=True)


def test_plain_types_keep_their_values():
    values = np.asarray([0.0, -1.5, 3.25, 1e-3, np.inf], np.float32)
    for name, dtype in (("F32", np.float32), ("F64", np.float64), ("F16", np.float16)):
        stored = values.astype(dtype)
        assert PLAIN[name](stored.view(np.uint8)).tolist() == stored.astype(np.float32).tolist()
    stored = values.astype(jax.numpy.bfloat16)
    assert widen_bfloat16(stored.view(np.uint8)).tolist() == stored.astype(np.float32).tolist()


def test_rotary_pairs_become_halves():
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    assert pairs_to_halves(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


class Held(WeightSource):
    """Tensors from memory, which notes what is read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: each.shape for name, each in tensors.items()}
        self.read_names: list[str] = []

    def read(self, name):
        self.read_names.append(name)
        return self.tensors[name]

    def close(self):
        pass


def source_for(description, **more) -> Held:
    rng = np.random.default_rng(2)
    shape = ModelShape.of(description, 1)
    shapes = needed_shapes(shape, all_recipes(shape))
    tensors = {name: rng.standard_normal(each, dtype=np.float32) for name, each in shapes.items()}
    return Held(tensors | more)


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    "config", [{}, BIASES | {"tie_word_embeddings": False}], ids=["tied", "all"]
)
def test_the_devices_parts_are_the_whole_model_bit_for_bit(description, devices, config):
    made = description(hf_config=config, num_heads=6, vocab_size=97, intermediate_size=41)
    source = source_for(made)
    shape = ModelShape.of(made, devices)
    mesh = make_mesh(jax.devices("cpu")[:devices])
    params = load_params(source, shape, mesh, np.float32)
    for array in params.arrays():
        assert len(array.sharding.device_set) == devices
    found = dict(whole_tensors(params, shape))
    assert found.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert (found[name] == tensor).all(), name
    qkv = params.layers[0]["qkv"]
    rows = (6 if devices < 3 else 2) * 8
    if devices == 3:
        shard = np.asarray(qkv.addressable_shards[1].data)
        prefix = "model.layers.0.self_attn."
        assert (shard[:rows] == source.tensors[prefix + "q_proj.weight"][16:32]).all()
        assert (shard[rows : rows + 8] == source.tensors[prefix + "k_proj.weight"][8:16]).all()


def test_needed_shapes_are_those_of_the_checkpoint(description):
    for config in ({}, {"tie_word_embeddings": False}):
        made = description(hf_config=config)
        shape = ModelShape.of(made, 2)
        assert needed_shapes(shape, all_recipes(shape)) == expected_shapes(made)


def load(source, description, **more):
    shape = ModelShape.of(description, 1)
    return load_params(source, shape, make_mesh(jax.devices("cpu")[:1]), np.float32, **more)


def test_wrong_tensors_are_named_before_any_is_read(description):
    made = description()
    cases = []
    source = source_for(made)
    del source.shapes["model.norm.weight"]
    cases.append((source, "1 weights of the model are missing: model.norm.weight"))
    source = source_for(made, odd=np.zeros(3, np.float32))
    cases.append((source, "1 weights have no place in the model .*: odd"))
    source = source_for(made)
    source.shapes["model.norm.weight"] = (7,)
    cases.append((source, r"'model.norm.weight' has shape \[7\], .* has \[24\]"))
    for source, words in cases:
        with pytest.raises(CheckpointError, match=words):
            load(source, made)
        assert source.read_names == []


def test_what_the_model_has_no_use_for_is_left_out(description):
    made = description()
    extra = {
        "lm_head.weight": np.zeros(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(1),
    }
    source = source_for(made, **extra)
    load(source, made)
    assert not set(source.read_names) & set(extra)


def test_loading_ends_when_it_is_given_up(description):
    source = source_for(description())
    with pytest.raises(CancelledStepError, match="loading"):
        load(source, description(), cancelled=lambda: len(source.read_names) >= 5)
    assert len(source.read_names) < 8


def test_dummy_weights_are_those_of_the_torch_toolkit(description):
    from hardpoint_runtime.loading.random import RandomWeights
    from torch import float32

    ours, theirs = RandomSource(description(), 5), RandomWeights(description(), 5)
    assert ours.shapes == theirs.shapes
    for name in ours.shapes:
        assert (ours.read(name) == theirs.read(name, float32).numpy()).all()


def write_folder(folder, tensors, dtype="F32"):
    """A model folder of one safetensors file."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 97,
        "num_hidden_layers": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {
            "dtype": dtype, "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return read_description(folder)


def test_a_safetensors_folder_is_read(description, tmp_path):
    held = source_for(description())
    found = write_folder(tmp_path, held.tensors)
    with open_weights(found) as source:
        assert {name: source.read(name).tolist() for name in source.shapes} == {
            name: tensor.tolist() for name, tensor in held.tensors.items()
        }


@pytest.mark.parametrize("grid", [(), (24, 1), (2, 3)], ids=["tensor", "rows", "blocks"])
def test_scaled_weights_are_read_as_the_torch_toolkit_reads_them(description, tmp_path, grid):
    import torch
    from hardpoint_runtime.loading.safetensors import SafetensorsWeights
    from safetensors.torch import save_file

    write_folder(tmp_path, source_for(description()).tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(description())
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.rand(grid)
    save_file(tensors, tmp_path / "model.safetensors")
    made = read_description(tmp_path)
    with open_weights(made) as ours, SafetensorsWeights(made) as theirs:
        assert ours.shapes == theirs.shapes == shapes
        for each in shapes:
            assert (ours.read(each) == theirs.read(each, torch.float32).numpy()).all(), each


def test_a_type_that_is_no_weight_is_refused_by_name(description, tmp_path):
    held = source_for(description())
    found = write_folder(tmp_path, {n: t.astype(np.int32) for n, t in held.tensors.items()}, "I32")
    with pytest.raises(UnsupportedModelError, match="is of type I32, which is not read here"):
        open_weights(found)


class Loaded(Held):
    """A loader as a plugin offers it, in half precision."""

    def __init__(self, description):
        super().__init__(
            {n: t.astype(np.float16) for n, t in source_for(description).tensors.items()}
        )


def offered(reference):
    return {"dummy": Offer(name="dummy", reference=reference)}


def test_a_plugins_loader_wins_for_its_format(description):
    made = description()
    source = open_weights(made, offers=offered(f"{__name__}:Loaded"))
    assert isinstance(source, Loaded)
    params = load(source, made)
    found = dict(whole_tensors(params, ModelShape.of(made, 1)))
    assert {array.dtype.name for array in params.arrays()} == {"float32"}
    assert all((found[name] == tensor).all() for name, tensor in source.tensors.items())


def test_a_loader_for_torch_is_refused_by_name(description):
    with pytest.raises(UnsupportedModelError, match=r"'builtins:id' .* gives int, and here a"):
        open_weights(description(), offers=offered("builtins:id"))


def test_an_unknown_format_is_refused(description):
    with pytest.raises(UnsupportedModelError, match="reads no weights of the format 'zip'"):
        open_weights(description(format="zip"))


def test_the_default_models_file_is_read_as_the_torch_toolkit_reads_it():
    from pathlib import Path

    from hardpoint.default_model import find_default_model
    from hardpoint_runtime.loading.gguf import GGUFWeights
    from torch import float32

    found = read_description(Path(find_default_model()))
    names = ["model.layers.3.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
             "model.layers.7.mlp.down_proj.weight", "model.norm.weight"]  # fmt: skip
    with open_weights(found) as ours, GGUFWeights(found) as theirs:
        assert set(ours.shapes) == set(theirs.shapes)
        for name in names:
            assert (ours.read(name) == theirs.read(name, float32).numpy()).all(), name
