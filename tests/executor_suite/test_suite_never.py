"""rpc.pickle = "never": over the whole API, no process of ours unpickles anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("whole_api.py")

PROBE = """
# Loaded by every interpreter of the run, before anything else: notes each use of an unpickler.
import _pickle, os, pickle, sys

def note(name):
    line = f"{os.getpid()} {name}\\n".encode()
    fd = os.open(os.environ["UNPICKLED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, line)
    os.close(fd)

def noting(name, function):
    def noted(*args, **kwargs):
        note(name)
        return function(*args, **kwargs)
    return noted

class Unpickler(_pickle.Unpickler):
    def __init__(self, *args, **kwargs):
        note("Unpickler")
        super().__init__(*args, **kwargs)

class PythonUnpickler(pickle._Unpickler):
    def __init__(self, *args, **kwargs):
        note("_Unpickler")
        super().__init__(*args, **kwargs)

for module in (pickle, _pickle):
    for name in ("load", "loads"):
        setattr(module, name, noting(name, getattr(module, name)))
    module.Unpickler = Unpickler
pickle._Unpickler = PythonUnpickler
sys.addaudithook(
    lambda event, args: note(event) if event == "pickle.find_class" else None
)
note("begun")
"""


@pytest.fixture
def use_everything(tmp_path):
    """Run the whole API in a process; return (what it printed, what unpicklers were used how
    often, the number of processes).
    """

    def run(executor, channel, pickle):
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(PROBE)
        (tmp_path / "work").mkdir()
        log = tmp_path / "unpickled"
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, str(SCRIPT), executor, channel, pickle, str(tmp_path / "work")],
            env={**os.environ, "PYTHONPATH": path, "UNPICKLED": str(log)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        notes = [line.split() for line in log.read_text().splitlines()]
        counts = Counter(name for _, name in notes)
        del counts["begun"]
        return json.loads(done.stdout.splitlines()[-1]), counts, {pid for pid, _ in notes}

    return run


WAYS = [("uni", ""), ("mp", "shared_memory"), ("mp", "zmq")]
CALLABLES = {
    "apply_model", "collective_rpc of a function", "collective_rpc of a lambda",
    "collective_rpc of an object",
}  # fmt: skip


@pytest.mark.parametrize(("executor", "channel"), WAYS)
def test_nothing_is_unpickled_anywhere(use_everything, executor, channel):
    told, counts, processes = use_everything(executor, channel, "never")
    assert counts == {}
    assert len(processes) >= (1 if executor == "uni" else 2), "the probe is in the nursery too"
    assert told["missed"] == [], "a part of the API that this test does not use"
    assert told["tokens"] == 4
    for name in CALLABLES:
        kind, text = told["refused"][name]
        assert (kind, 'rpc.pickle = "never"' in text) == ("UntypedError", True), name
    others = {name for name in told["refused"] if name not in CALLABLES}
    assert others <= {
        "collective_rpc that fails", "collective_rpc that times out", "reinitialize_distributed",
    }  # fmt: skip


@pytest.mark.parametrize(("executor", "channel"), WAYS[:2])
def test_the_probe_sees_an_unpickler_where_there_is_one(use_everything, executor, channel):
    told, counts, _ = use_everything(executor, channel, "local")
    assert counts["loads"] > 0
    assert CALLABLES - set(told["refused"]) >= {"apply_model", "collective_rpc of a lambda"}
