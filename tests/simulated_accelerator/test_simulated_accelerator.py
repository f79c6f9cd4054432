"""The whole house on a torch device that is not the host: every hidden assumption shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What one process of its own said."""
    process = subprocess.run(
        [sys.executable, HERE / "run_house.py", tmp_path_factory.mktemp("plugin")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_the_default_model_gives_the_tokens_of_the_host(report):
    assert report["acme"]["tokens"] == report["cpu"]["tokens"]
    assert all(len(tokens) == 8 for tokens in report["cpu"]["tokens"])


def test_the_weights_are_on_the_device_and_computed_there(report):
    assert report["cpu"]["devices"] == ["cpu"]
    assert report["acme"]["devices"] == ["acme:0"]
    layers, steps = 30, 8
    assert report["calls"]["aten::mm"] >= layers * 4 * steps
    assert report["calls"]["aten::index_copy_"] >= layers * 2 * steps


def test_the_host_reads_only_through_the_port(report):
    """A hidden ``.cpu()``, ``.item()`` or copy would be a read that the port does not know of."""
    reads = report["acme"]["reads"]
    assert set(reads) == {"aten::_to_copy"}
    assert reads["aten::_to_copy"] == report["acme"]["reads_by_port"]
    assert 8 <= report["acme"]["reads_by_port"] <= 8 * 16


@pytest.mark.parametrize("classes", ["graphs", "shared"])
def test_graphs_replay_on_the_device_with_the_tokens_of_the_host(classes, report):
    """Decode in FULL graphs, prefill in PIECEWISE ones, and what is longer than any eagerly; with
    the plugin's own worker and runner, and with those that accelerators share.
    """
    graphs = report[classes]
    assert graphs["tokens"] == report["cpu"]["tokens"]
    assert graphs["steps"]["FULL"] >= 5
    assert graphs["steps"]["PIECEWISE"] >= 1
    assert set(graphs["reads"]) == {"aten::_to_copy"}
    assert graphs["reads"]["aten::_to_copy"] == graphs["reads_by_port"]


def test_the_device_was_taken_through_its_module(report):
    assert report["module"]["set_device"] == 1
    assert report["module"]["synchronize"] >= 1


def test_the_device_notices_what_it_must(report):
    assert "expected all tensors to be on acme:0" in report["controls"]["mixed"]
    assert report["controls"]["reads"] == 3


def test_the_device_has_its_memory_back(report):
    assert report["held"] == 0
