"""What a start does, counted: nothing through torch where a program runs the steps, and one copy of
the weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.errors import HardpointError
from hardpoint_cpu.native.library import availability
from hardpoint_engine import SamplingParams
from hardpoint_runtime import warm_up
from hardpoint_runtime.models.decoder import DecoderForCausalLM
from hardpoint_runtime.sampling.sampler import Sampler
from native_models import PROMPTS, engine, program_threads, tokens

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BETWEEN = 24 << 20
"""Bytes that a start takes beside weights: buffers, tables, modules that are loaded late."""


@pytest.mark.parametrize("measured", [False, True])
def test_a_start_with_a_program_runs_nothing_of_torch(checkpoint, monkeypatch, measured):
    """Neither to warm up, nor to find how much memory is left for the cache."""
    keys = {"num_kv_blocks": None, "memory_utilization": 0.3} if measured else {}
    with engine(checkpoint("llama"), "off") as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))

    def refuse(*args, **kwargs):
        raise AssertionError("torch was asked")

    monkeypatch.setattr(DecoderForCausalLM, "forward", refuse)
    monkeypatch.setattr(DecoderForCausalLM, "compute_logits", refuse)
    monkeypatch.setattr(Sampler, "sample", refuse)
    with engine(checkpoint("llama"), "on", **keys) as llm:
        assert program_threads(llm)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(HardpointError, match="torch was asked"):
        engine(checkpoint("llama"), "off", **keys).close()


def test_what_torch_may_take_is_left_out_of_the_cache(checkpoint, monkeypatch):
    """Though a start does not run it."""

    def cache_bytes(llm) -> int:
        return llm.collective_rpc(lambda worker: worker.model_runner.program_bytes())[0]

    few = {"max_num_seqs": 2, "max_num_batched_tokens": 128}
    many = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    with engine(checkpoint("llama"), "on", **few) as llm:
        least = cache_bytes(llm)
    with engine(checkpoint("llama"), "on", **many) as llm:
        assert cache_bytes(llm) > 8 * least
    assert warm_up.PROFILED_LAYERS


def test_rows_that_are_prepared_for_products_are_left_out_of_the_cache_too(checkpoint):
    """Each token has its buffers, torch's like, and the widest row once more, of four bytes a
    number where weights are bfloat16.
    """

    def known(llm):
        return llm.collective_rpc(
            lambda worker: (
                worker.model_runner.program_bytes(), worker.model_runner.program._lowered.columns
            )
        )[0]  # fmt: skip

    few, many = 128, 2048
    with engine(checkpoint("llama"), "on", max_num_seqs=2, max_num_batched_tokens=few) as llm:
        least, columns = known(llm)
    with engine(checkpoint("llama"), "on", max_num_seqs=2, max_num_batched_tokens=many) as llm:
        most, _ = known(llm)
    assert (most - least) / (many - few) >= 4 * (2 * sum(columns) + max(columns))


MEASURE = """
import json, sys
from pathlib import Path
import torch, hardpoint_cpu.worker
from hardpoint_engine import LLM, SamplingParams
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if "kB" in line}
    return found["RssAnon"] + found["RssShmem"]
def dirty():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))
before = held(), dirty()
keys = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], platform="cpu", executor="uni", max_model_len=64, num_kv_blocks=8,
          max_num_seqs=1, max_num_batched_tokens=64, **keys)
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
def weights(worker):
    model = worker.model_runner.get_model()
    return sum({each.data_ptr(): each.nbytes for each in model.parameters()}.values())
found = llm.collective_rpc(weights)[0]
print(json.dumps([found, held() - before[0], dirty() - before[1]]))
llm.shutdown()
"""


def start(folder: Path, **keys) -> list[int]:
    """Return the bytes of a model's weights, and by how much a process that serves it has grown."""
    command = [sys.executable, "-c", MEASURE, str(folder), json.dumps(keys)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 66 MiB in bfloat16, nearly all of it embeddings."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("large")
    config = transformers.LlamaConfig(
        vocab_size=60000, hidden_size=512, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(97)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_weights_are_in_memory_once(large, tmp_path):
    weights, grown, dirty = start(large)
    assert weights > 60 << 20
    assert grown <= 1.3 * weights + BETWEEN
    assert dirty <= 1.3 * weights + BETWEEN
    packed = {"quantization": "int8", "plugins": {"cpu": {"packed_cache": str(tmp_path / "kept")}}}
    for _ in range(2):  # packing, and mapping what was packed
        weights, grown, dirty = start(large, **packed)
        assert 30 << 20 < weights < 40 << 20
        assert grown <= 1.3 * weights + BETWEEN
        assert dirty <= 1.3 * weights + BETWEEN
    assert len(list((tmp_path / "kept").iterdir())) == 1
