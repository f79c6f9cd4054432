"""Ranks that torchrun started answer as one worker does, on every rank; with a driver, rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("launched_engine.py")
DRIVER = "plugins.external_launcher.driver_only=true"


def torchrun(count, folder, *keys, program=PROGRAM):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        str(program), str(folder), *keys,
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if folder.is_file():
        return json.loads(folder.read_text())
    return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}


def same(found, expected):
    return (
        found["tokens"] == expected["tokens"]
        and found["preemptions"] == expected["preemptions"]
        and all(
            row == pytest.approx(other, abs=1e-4)
            for row, other in zip(found["logprobs"], expected["logprobs"], strict=True)
        )
    )


@pytest.mark.parametrize(
    ("count", "keys"),
    [
        (2, ("tensor_parallel_size=2",)),
        pytest.param(3, ("tensor_parallel_size=3",), marks=pytest.mark.slow),
        pytest.param(2, ("pipeline_parallel_size=2",), marks=pytest.mark.slow),
    ],
)
def test_every_rank_answers_as_one_worker_does(count, keys, tmp_path, expected):
    found = torchrun(count, tmp_path, *keys)
    assert sorted(found) == list(range(count))
    for rank in range(count):
        assert found[rank]["tokens"] == expected["tokens"], f"rank {rank}"
    if "tensor" in keys[0]:
        assert all(same(found[rank], expected) for rank in range(count))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [("tensor_parallel_size=2",), ("pipeline_parallel_size=2",)], ids=["tensor", "stages"]
)
def test_with_a_driver_rank_0_answers_alone(keys, tmp_path, expected):
    found = torchrun(2, tmp_path, *keys, DRIVER)
    assert sorted(found) == [0]
    assert found[0]["tokens"] == expected["tokens"]


@pytest.mark.slow
def test_two_steps_in_flight_keep_their_order_on_every_stage(tmp_path):
    """Row V7: each stage takes them as they were given, or the caches would be others."""
    found = torchrun(2, tmp_path / "found", program=PROGRAM.with_name("launched_stages.py"))
    assert found["one"] == found["two"] == found["again"]
    assert found["one"]["a"] != found["one"]["b"]
    assert all(len(said) == 6 for said in found["two"].values())
