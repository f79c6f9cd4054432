"""The default model by the kernels of GPUs, in Triton's interpreter: the tokens of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
