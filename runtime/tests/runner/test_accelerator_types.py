"""Workers of accelerators in the types of 16 bits: what is loaded, cached and computed is of the
type, and close to float32.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config.schema import CacheConfig
from hardpoint.sampling_params import SamplingParams

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PROMPT = [5, 9, 3, 5, 9, 3, 7, 1]


def scores(make_driver, worker):
    """Return the log-probabilities of every token of the prompt's next ones, all of them."""
    driver = make_driver(worker.model_runner, num_blocks=60)
    driver.add("a", PROMPT, SamplingParams(temperature=0, logprobs=97))
    driver.run(1)
    (each,) = driver.logprobs["a"]
    found = dict(zip(each.ids[0], each.values[0], strict=True))
    return torch.tensor([found[token] for token in range(97)])


@pytest.fixture
def of_type(make_accelerator, folder):
    def make(dtype, path=folder, **more):
        description = read_description(str(path))
        return make_accelerator(description=description, dtype=dtype, **more)

    return make


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_a_model_is_held_and_cached_in_its_type_and_close_to_float32(
    dtype, mode, of_type, make_driver
):
    worker = of_type(dtype, mode=mode)
    assert {each.dtype for each in worker.get_model().parameters()} == {TYPES[dtype]}
    caches = worker.model_runner.kv_cache.layers.values()
    assert {cache.key.dtype for cache in caches} == {TYPES[dtype]}
    apart = (scores(make_driver, worker) - scores(make_driver, of_type("float32"))).abs().max()
    assert 0 < apart < (0.02 if dtype == "float16" else 0.15)


def test_a_checkpoint_in_float16_is_loaded_to_the_bit(of_type, folder, tmp_path):
    from transformers import LlamaForCausalLM

    stored = LlamaForCausalLM.from_pretrained(folder).half()
    stored.save_pretrained(tmp_path)
    worker = of_type("float16", path=tmp_path)
    held = worker.port.to_host(worker.get_model().norm.weight)
    assert torch.equal(held, stored.model.norm.weight)
    embedded = worker.port.to_host(worker.get_model().embed.weight)
    assert torch.equal(embedded, stored.model.embed_tokens.weight)


def test_a_cache_may_be_of_another_type_than_the_model(of_type, make_driver):
    cache = CacheConfig(block_size=4, kv_cache_dtype="float16")
    worker = of_type("float32", cache=evolve(cache))
    layers = worker.model_runner.kv_cache.layers.values()
    assert {each.key.dtype for each in layers} == {torch.float16}
    apart = (scores(make_driver, worker) - scores(make_driver, of_type("float32"))).abs().max()
    assert 0 < apart < 0.02
