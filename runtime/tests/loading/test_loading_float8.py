"""Weights of eight bits: as they are stored, and multiplied by the scales beside them."""

from __future__ import annotations

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.errors import CheckpointError, UnsupportedModelError
from hardpoint_runtime.loading import open_weights
from safetensors.torch import save_file

TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
BLOCK = [32, 40]
"""No divisor of the shapes here (64 and 96): the last blocks are smaller."""


def name_of(part: str) -> str:
    return f"model.layers.0.{part}.weight"


Q, DOWN = name_of("self_attn.q_proj"), name_of("mlp.down_proj")


def shrink(tensors, dtype, form: str, suffix: str = "_scale_inv") -> dict[str, torch.Tensor]:
    """Store all matrices of the layers in eight bits; what each must be read as, in float32."""
    torch.manual_seed(1)
    expected = {}
    for name in [each for each in tensors if ".layers." in each and tensors[each].ndim == 2]:
        rows, columns = tensors[name].shape
        grid = {
            "tensor": (), "one": (1,), "rows": (rows, 1), "row": (rows,),
            "blocks": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])),
        }[form]  # fmt: skip
        scale = torch.rand(grid) + 0.5
        small = tensors[name].to(dtype)
        tensors[name], tensors[name + suffix] = small, scale
        if form == "blocks":
            wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            scale = wide[:rows, :columns]
        elif form == "row":
            scale = scale[:, None]
        expected[name] = small.float() * scale
    return expected


def read(folder, dtype=torch.float32):
    with open_weights(read_description(folder)) as weights:
        return dict(weights.iterate(dtype))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_scales_the_numbers_are_as_stored(tmp_path, disk, kind, dtype):
    tensors = disk.folder(tmp_path / "m", torch.float32)
    tensors[Q] = tensors[Q].to(TYPES[kind])
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert torch.equal(read(tmp_path / "m", dtype)[Q], tensors[Q].to(dtype))


@pytest.mark.parametrize(
    ("form", "suffix", "config"),
    [
        ("tensor", "_scale", {"quant_method": "fp8"}),
        ("one", "_scale_inv", {"quant_method": "fp8"}),
        ("rows", "_scale", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ("row", "_scale", {"quant_method": "fp8"}),
        ("blocks", "_scale_inv", {"quant_method": "fp8", "weight_block_size": BLOCK}),
        (
            "blocks",
            "_scale",
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"block_structure": BLOCK}}},
            },
        ),
    ],
)
@pytest.mark.parametrize("kind", TYPES)
def test_scales_multiply_what_they_stand_beside(tmp_path, disk, form, suffix, config, kind):
    tensors = disk.folder(tmp_path / "m", torch.float32, quantization_config=config)
    expected = shrink(tensors, TYPES[kind], form, suffix)
    beside = {Q.replace("weight", "input_scale"): torch.tensor(2.0)}
    save_file({**tensors, **beside}, tmp_path / "m" / "model.safetensors")
    got = read(tmp_path / "m")
    assert len(expected) == 14
    assert set(got) == {name for name in tensors if not name.endswith(suffix)}
    for name, values in expected.items():
        assert torch.equal(got[name], values), name
    rounded = read(tmp_path / "m", torch.bfloat16)
    assert torch.equal(rounded[DOWN], expected[DOWN].bfloat16())


def test_scales_may_lie_in_another_shard(tmp_path, disk):
    import json

    folder = tmp_path / "m"
    config = {"quant_method": "fp8", "weight_block_size": BLOCK}
    tensors = disk.folder(folder, torch.float32, quantization_config=config)
    expected = shrink(tensors, torch.float8_e4m3fn, "blocks")
    (folder / "model.safetensors").unlink()
    home = {}
    for index, wanted in enumerate((False, True)):
        part = {n: t for n, t in tensors.items() if n.endswith("_scale_inv") is wanted}
        save_file(part, folder / f"model-{index}.safetensors")
        home.update(dict.fromkeys(part, f"model-{index}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    assert torch.equal(read(folder)[Q], expected[Q])


@pytest.mark.parametrize(
    ("change", "message", "error"),
    [
        ({Q + "_scale_inv": None}, r"neither .*weight_scale_inv' nor .*weight_scale'", None),
        ({Q + "_scale_inv": torch.ones(3, 3)}, r"\[3, 3\], but the scale of .* must have", None),
        (
            {Q + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
            "of type I32 scales",
            UnsupportedModelError,
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, disk, change, message, error):
    config = {"quant_method": "fp8", "weight_block_size": BLOCK}
    tensors = disk.folder(tmp_path / "m", torch.float32, quantization_config=config)
    shrink(tensors, torch.float8_e4m3fn, "blocks")
    kept = {name: each for name, each in {**tensors, **change}.items() if each is not None}
    save_file(kept, tmp_path / "m" / "model.safetensors")
    with pytest.raises(error or CheckpointError, match=message):
        read(tmp_path / "m")


def test_scaled_weights_are_checked_against_the_configuration(tmp_path, disk):
    config = {"quant_method": "fp8", "weight_block_size": BLOCK}
    tensors = disk.folder(tmp_path / "m", torch.float32, quantization_config=config)
    shrink(tensors, torch.float8_e4m3fn, "blocks")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        read_description(tmp_path / "m")


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        ["fp8"],
        {"quant_method": "awq"},
        {"quant_method": ["fp8"]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [True, 128]},
        {"quant_method": "fp8", "weight_block_size": [10**30, 128]},
        {"quant_method": "fp8", "weight_block_size": "128"},
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, disk, config):
    disk.folder(tmp_path / "m", torch.float32, quantization_config=config)
    with pytest.raises(UnsupportedModelError, match=r"weights are quantised .* supported: fp8"):
        read(tmp_path / "m")
