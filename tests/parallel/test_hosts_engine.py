"""Models over two hosts, each an address of its own of this machine: the tokens of one worker."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hardpoint.rpc.network.listening import listening

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
COMMAND = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"


def _small_engine():
    spec = importlib.util.spec_from_file_location(
        "small_engine", Path(__file__).with_name("small_engine.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_engine = _small_engine()


@pytest.fixture
def hosts(tmp_path):
    """Start a follower; return the leader's settings."""
    with socket.socket() as probe:
        probe.bind((LEADER, 0))
        leader = f"{LEADER}:{probe.getsockname()[1]}"
    key = str(tmp_path / "key")
    command = [sys.executable, "-P", "-c", COMMAND, "worker", "--join", leader, "--key-file", key,
               "--address", OTHER]  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        follower = subprocess.Popen(command, stdout=said, stderr=said)
    yield {"nnodes": 2, "plugins.mp.leader": leader, "plugins.mp.key_file": key}
    assert follower.wait(60) == 0, (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(3, 1), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_two_hosts_answer_as_one_worker_does(expected, hosts, tensor, pipeline):
    before = listening(os.getpid())
    with small_engine.start(
        executor="mp", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **hosts
    ) as llm:
        found = small_engine.answers(llm)
        for mine, theirs in zip(found.pop("logprobs"), expected["logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)  # sums of several ranks are rounded
        assert found == {name: each for name, each in expected.items() if name != "logprobs"}
        group = llm.core.executor._resources.group
        where = [{host for host, _ in listening(each.pid)} for each in group._workers]
        shares = (2, 1) if tensor == 3 else (1, 1)
        assert where == [{LEADER}] * shares[0] + [{OTHER}] * shares[1]
        assert {host for host, _ in listening(os.getpid()) - before} == {LEADER}
