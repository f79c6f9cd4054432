"""``hardpoint generate`` with the default model over several workers: the tokens of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
REQUEST = (
    *("--max-tokens", "12", "--ignore-eos", "--max-model-len", "256"),
    *("What is the capital of France?", "Tell me about the sea."),
)


def generate(*flags):
    done = subprocess.run(
        [
            HARDPOINT,
            "generate",
            "--json",
            *("--platform", "cpu", "--dtype", "float32"),
            *flags,
            *REQUEST,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def alone():
    return generate("--executor", "uni")


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        (3, 1),
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_default_model_over_several_workers(alone, tensor, pipeline):
    """Nine query heads and three key-value heads: two shards are uneven, three even."""
    together = generate(
        *("--executor", "mp", "--tensor-parallel-size", str(tensor)),
        *("--pipeline-parallel-size", str(pipeline)),
    )
    assert together["executor"] == "mp"
    ids = [result["token_ids"] for result in together["results"]]
    assert ids == [result["token_ids"] for result in alone["results"]]
    assert [len(each) for each in ids] == [12, 12]


def test_a_size_that_cannot_be_is_said_before_anything_starts():
    done = subprocess.run(
        [HARDPOINT, "generate", "--executor", "mp", "--tensor-parallel-size", "4", "Hello"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2
    assert "tensor_parallel_size = 4 (flag --tensor-parallel-size)" in done.stderr
    assert "9 query and 3 key-value heads" in done.stderr
