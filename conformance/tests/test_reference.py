"""The kit's reference is the field's: transformers computes the same from the same folder."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hardpoint.adapters import LoRARequest
from hardpoint.checkpoints import read_description
from hardpoint.sampling_params import SamplingParams
from hardpoint_conformance.kit_adapter import ADAPTERS, write_adapter
from hardpoint_conformance.kit_model import ModelShape, write_model
from hardpoint_conformance.llama_oracle import LlamaOracle, read_tensors
from hardpoint_conformance.sampling_rules import chances, edited

TOKENS = [5, 9, 3, 77, 20, 0, 159, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [ModelShape(), ModelShape(head_size=16, num_kv_heads=1, tied=True, seed=4)]
)
def test_the_oracle_computes_what_transformers_computes(tmp_path, shape):
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM

    folder = write_model(tmp_path / "model", shape)
    ours = LlamaOracle(read_description(str(folder))).logits(TOKENS)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert np.abs(ours).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_the_oracle_under_an_adapter_adds_what_peft_adds(tmp_path, adapter):
    """Each layer's output gets ``x A^T B^T lora_alpha / r``, here in torch, by hooks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    description = read_description(str(write_model(tmp_path / "model", ModelShape())))
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(folder, description, adapter)
    request = LoRARequest(id=1, name="a", path=str(folder))
    oracle = LlamaOracle(description)
    ours = oracle.adapted(request).logits(TOKENS)
    model = transformers.LlamaForCausalLM.from_pretrained(description.path, dtype=torch.float32)
    arrays = {name: torch.tensor(each).float() for name, each in read_tensors(folder).items()}

    def added(name):
        first, second = (arrays[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        scale = adapter.alpha / adapter.rank
        return lambda _module, inputs, output: output + inputs[0] @ first.T @ second.T * scale

    changed = [
        module.register_forward_hook(added(name)) for name, module in model.named_modules()
        if name.rpartition(".")[2] in adapter.targets
    ]  # fmt: skip
    assert len(changed) == len(arrays) / 2
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=5e-4)
    assert np.abs(ours - oracle.logits(TOKENS)).max() > 0.1


def test_the_rules_in_their_order():
    logits = np.array([3.0, 2.0, 1.0, 0.0, -1.0])
    plain = SamplingParams()
    allowed = evolve(plain, allowed_token_ids=(1, 2))
    assert edited(logits, allowed, (), ()).tolist() == [-np.inf, 2, 1, -np.inf, -np.inf]
    words = evolve(plain, bad_word_ids=((1, 0), (4,)))
    assert edited(logits, words, (), (1,)).tolist() == [-np.inf, 2, 1, 0, -np.inf]
    assert edited(logits, words, (), (2,)).tolist() == [3, 2, 1, 0, -np.inf]
    early = evolve(plain, min_tokens=2, stop_token_ids=(0,))
    assert edited(logits, early, (), (1,), (1,)).tolist()[:2] == [-np.inf, -np.inf]
    assert edited(logits, early, (), (1, 2), (1,)).tolist() == logits.tolist()
    penalised = evolve(plain, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert edited(logits, penalised, (0, 4), (1, 1)).tolist() == [1.5, 1 - 1.25, 1, 0, -2]
    assert edited(logits, evolve(plain, logit_bias={3: 500.0}), (), ())[3] == 100


def test_what_can_be_drawn():
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    plain = SamplingParams()
    np.testing.assert_allclose(chances(row, plain), [0.5, 0.25, 0.15, 0.1])
    np.testing.assert_allclose(chances(row, evolve(plain, top_k=2)), [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(chances(row, evolve(plain, top_p=0.6)), [2 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(chances(row, evolve(plain, min_p=0.4)), [2 / 3, 1 / 3, 0, 0])
    squared = chances(row, evolve(plain, temperature=0.5))
    np.testing.assert_allclose(squared[0] / squared[1], 4)
