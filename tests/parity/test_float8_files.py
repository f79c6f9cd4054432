"""Weights stored in blocks of eight bits: multiplied out as transformers does."""

from __future__ import annotations

import json

import torch
from hardpoint.checkpoints import read_description
from hardpoint_runtime.loading import open_weights
from safetensors.torch import load_file, save_file

BLOCK = (64, 32)  # which divide every shape here: transformers wants that


def test_blocks_of_eight_bits_are_what_transformers_reads(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [each for each in tensors if ".layers." in each and tensors[each].ndim == 2]:
        grid = [-(-size // side) for size, side in zip(tensors[name].shape, BLOCK, strict=True)]
        tensors[f"{name}_scale_inv"] = torch.rand(grid) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=BLOCK
        ),
    )
    with open_weights(read_description(tmp_path)) as weights:
        got = dict(weights.iterate(torch.float32))
    state = theirs.state_dict()
    assert set(got) == set(state)
    for name, tensor in state.items():
        assert torch.equal(got[name], tensor), name
