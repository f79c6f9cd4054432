"""The default model under torchrun: rank 0 alone prints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

QUESTION = "What is the capital of France?"


@pytest.mark.slow
@pytest.mark.parametrize("driver", [False, True])
def test_rank_0_alone_prints_the_answer(driver):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    count = 2 if driver else 3
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        str(Path(sys.executable).with_name("hardpoint")), "generate", QUESTION,
        "--executor", "external_launcher", "--tensor-parallel-size", str(count),
        "--max-tokens", "12",
    ]  # fmt: skip
    if driver:
        command += ["--set", "plugins.external_launcher.driver_only=true"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.stderr.count("executor external_launcher") == 1
