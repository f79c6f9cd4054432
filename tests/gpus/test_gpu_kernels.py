"""Engines on the platforms of GPUs launch the kernels, here in Triton's interpreter: a tiny model's
tokens are torch's, the default model's those of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hardpoint_runtime.kernels.offers import KERNELS

PROMPT = "The capital of France is"
EXPECTED = [7042, 30, 198, 198]
"""Of transformers, greedy, in float32."""
PROGRAM = """
import json, sys
from hardpoint_engine import LLM, SamplingParams
keys = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "num_kv_blocks": 16}
with LLM(platform="cuda", executor="uni", plugins={"cuda": {"substitute": "host"}}, **keys) as llm:
    choices = llm.collective_rpc(lambda worker: [
        (each.name, each.reference) for each in worker.model_runner.operations.choices
    ])[0]
    params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]))
    ids = list(llm.generate([sys.argv[1]], params)[0].outputs[0].token_ids)
print(json.dumps([dict(choices), ids]))
"""

COUNTING = """
import importlib, json, sys
import triton
from hardpoint_conformance.kit_model import ModelShape, write_model
from hardpoint_engine import LLM, SamplingParams
from tokenizers import Tokenizer, models
from pathlib import Path

KERNELS = {
    "slots": ["slot_mapping_kernel"], "kv_write": ["kv_write_kernel"],
    "blocks": ["zero_blocks_kernel", "copy_blocks_kernel"],
    "paged_decode": ["paged_decode_kernel"], "paged_prefill": ["paged_prefill_kernel"],
    "penalties": ["penalise_kernel"], "filters": ["temper_kernel", "truncate_kernel"],
}

class Counting:
    def __init__(self, kernel, name):
        self.kernel, self.name = kernel, name
    def __getitem__(self, grid):
        counts[self.name] += 1
        return self.kernel[grid]

counts = {name: 0 for names in KERNELS.values() for name in names}
for module, names in KERNELS.items():
    module = importlib.import_module("hardpoint_runtime.kernels." + module)
    for name in names:
        setattr(module, name, Counting(getattr(module, name), name))

platform, folder = sys.argv[1], Path(sys.argv[2])
shape = ModelShape(head_size=24, num_heads=6, num_kv_heads=2, vocab_size=131)
write_model(folder, shape)
words = {f"w{token}": token for token in range(shape.vocab_size)}
Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))

def moved(worker):
    cache = worker.model_runner.kv_cache
    first = cache.layers[next(iter(cache.layers))].key
    first[11], first[12] = 3.0, 5.0
    cache.copy_blocks([(0, 12, 13)])
    cache.zero_blocks([11])
    return [float(first[block].sum() / first[block].numel()) for block in (11, 12, 13)]

def run():
    keys = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 16,
            "block_size": 8, "graph_mode": "none"}
    with LLM(str(folder), platform=platform, executor="uni",
             plugins={platform: {"substitute": "host"}}, **keys) as llm:
        choices = llm.collective_rpc(lambda worker: [
            (each.name, each.reference) for each in worker.model_runner.operations.choices
        ])[0]
        more = {"max_tokens": 2, "ignore_eos": True}
        params = [
            SamplingParams(temperature=0, **more),
            SamplingParams(temperature=0, repetition_penalty=1.3, **more),
            SamplingParams(temperature=0.9, seed=5, top_k=20, top_p=0.8, min_p=0.01, **more),
        ]
        prompts = [[5, 9, 3, 5, 9, 3, 5], [1], list(range(30, 41))]
        ids = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
        return dict(choices), ids, llm.collective_rpc(moved)[0]

found = run()
launched = dict(counts)
triton.knobs.runtime.interpret = False
plain = run()
print(json.dumps([found, launched, plain, counts]))
"""
"""Counts the launches of two engines: in the second, Triton has no device to offer kernels for."""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_engines_launch_every_kernel(platform, tmp_path):
    """But those of rejection: runners refuse drafts so far, and have them ready only."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, platform, str(tmp_path / "model")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, launched, plain, counts = json.loads(done.stdout.splitlines()[-1])
    for name in KERNELS:
        assert found[0][name].startswith("hardpoint_runtime.kernels."), found
        assert plain[0][name] == "built-in"
    assert all(launched.values()), launched
    assert counts == launched, "torch's operations launch no kernel"
    assert found[1:] == plain[1:]
    assert found[2] == [0.0, 5.0, 5.0]


@pytest.mark.slow
def test_the_default_model_by_interpreted_kernels():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, PROMPT, str(len(EXPECTED))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    choices, ids = json.loads(done.stdout.splitlines()[-1])
    for name in ("attention", "kv_write", "slot_mapping"):
        assert choices[name].startswith("hardpoint_runtime.kernels."), choices
    assert ids == EXPECTED
