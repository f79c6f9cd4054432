"""Over two hosts, no process of either unpickles anything."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
COMMAND = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"


def probe():
    path = Path(__file__).with_name("test_suite_never.py")
    spec = importlib.util.spec_from_file_location("suite_never_probe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PROBE


def run(tmp_path, pickle):
    """Answer a prompt over two hosts; return the token ids, and which unpicklers were used by whom:
    (leader's side, follower's side).
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(probe())
    with socket.socket() as free:
        free.bind((LEADER, 0))
        leader = f"{LEADER}:{free.getsockname()[1]}"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    key = str(tmp_path / "key")

    def start(name, *arguments):
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": path, "UNPICKLED": str(tmp_path / name)},
            stdout=subprocess.PIPE,
            text=True,
        )

    follower = start("follower", "worker", "--join", leader, "--key-file", key, "--address", OTHER)
    driver = start(
        "leader", "generate", "--raw", "--json", "--executor", "mp", "--platform", "dummy",
        "--load-format", "dummy", "--model", "dummy", "--nnodes", "2", "--seed", "3",
        "--set", f"plugins.mp.leader={leader}", "--set", f"plugins.mp.key_file={key}",
        "--set", f"rpc.pickle={pickle}", "--set", "plugins.dummy.num_workers=2",
        "--max-tokens", "5", "hi",
    )  # fmt: skip
    out = driver.communicate(timeout=120)[0]
    assert driver.returncode == 0
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    counts = []
    for name in ("leader", "follower"):
        notes = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        found = Counter(kind for _, kind in notes)
        assert found.pop("begun") >= 2, "the probe was not loaded"
        counts.append(found)
    return json.loads(out)["results"][0]["token_ids"], counts


def test_nothing_is_unpickled_on_either_host(tmp_path):
    ids, (leader, follower) = run(tmp_path, "never")
    assert len(ids) == 5
    assert leader == {}
    assert follower == {}


def test_what_crosses_is_never_pickled_whatever_is_used_on_the_leaders_host(tmp_path):
    _, (leader, follower) = run(tmp_path, "local")
    assert sum(leader.values()) > 0, "the control: on its own host the leader pickles"
    assert follower == {}
