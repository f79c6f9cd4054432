"""The default model answers on each platform of GPUs, from the command line, with host memory in
the place of a GPU: the tokens are those of transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

EXPECTED = [7042, 30, 198, 198, 504, 2988, 314, 42]
"""Of transformers, greedy, in float32, after "The capital of France is"."""


@pytest.mark.parametrize(
    "name", ["cuda", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rocm", "xpu"))]
)
def test_the_default_model_answers(name):
    options = {
        "--platform": name, "--set": f"plugins.{name}.substitute=host", "--dtype": "float32",
        "--max-model-len": "64", "--max-num-seqs": "2", "--num-kv-blocks": "16",
        "--max-tokens": "8", "--temperature": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "generate", "--json", "--raw",
         *(word for pair in options.items() for word in pair), "The capital of France is"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"on platform {name}" in done.stderr
    told = json.loads(done.stdout)
    assert (told["platform"], told["results"][0]["token_ids"]) == (name, EXPECTED)
