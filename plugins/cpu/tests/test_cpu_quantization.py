"""Weights that are held packed: the same numbers as the packing says, in no more memory."""

from __future__ import annotations

import pytest
import torch
from hardpoint.errors import ConfigError
from hardpoint_engine import LLM, SamplingParams
from hardpoint_runtime.quantization import form_of
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
