"""``benchmarks/gpu_check.sh`` where no GPU is: a dry run, and the reason otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / "benchmarks" / "gpu_check.sh"
sys.path.insert(0, str(SCRIPT.parent))


def run(out, *arguments, code=0):
    """Run the script as on a machine that has only the checkout; return its lines by step."""
    done = subprocess.run(
        [str(SCRIPT), "--out", str(out), "--minutes", "25", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1600,
        check=False,
    )
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    lines = (out / "gpu_check.jsonl").read_text().splitlines()
    assert lines == done.stdout.splitlines()
    return {each["step"]: each for each in map(json.loads, lines)}


def test_steps_run_on_host_memory(tmp_path):
    found = run(tmp_path, "--dry-run", "--only", "probe,sleep,streams")
    assert {name: each["outcome"] for name, each in found.items()} == {
        "probe": "ok", "sleep": "ok", "streams": "skipped",
    }, found  # fmt: skip
    assert 0 < found["probe"]["held"] <= found["probe"]["total"]
    assert set(found["sleep"]) >= {"level 1", "level 2"}
    assert found["streams"]["reason"] == "host memory has no streams"


@pytest.mark.slow
def test_every_step_runs_on_host_memory(tmp_path):
    from gpu_check import STEPS

    found = run(tmp_path, "--dry-run")
    assert list(found) == list(STEPS)
    bad = {n: each for n, each in found.items() if each["outcome"] != "ok" and n != "streams"}
    assert not bad


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU may be here")
def test_without_a_gpu_every_step_says_so(tmp_path):
    from gpu_check import NO_GPU, STEPS

    found = run(tmp_path)
    assert list(found) == list(STEPS)
    assert {(each["outcome"], each["reason"]) for each in found.values()} == {("skipped", NO_GPU)}


def test_a_step_that_outlasts_its_time_leaves_a_line(tmp_path):
    """No step begins, computes and ends within a twentieth of a second."""
    import argparse

    from gpu_check import run_step

    options = argparse.Namespace(dry_run=True, model=None, out=tmp_path)
    line = run_step("probe", 0.05, options, dict(os.environ))
    assert (line["step"], line["outcome"], line["reason"]) == ("probe", "timeout", "above 0 s")
    assert line["so_far"] == {}


def test_what_a_killed_step_had_found_is_read_back():
    from gpu_check import last_object

    assert last_object('warning\n{"full": 1}\n{"full": 1, "piecewise": 2}\n[3]\n{"cut') == {
        "full": 1, "piecewise": 2,
    }  # fmt: skip
    assert last_object("nothing\n") == {}


def test_wheels_in_parts_are_put_together(tmp_path):
    """As a machine gets them whose loans carry less than the default model."""
    from gpu_check import make_site

    carried, site = tmp_path / "carried", tmp_path / "site"
    for each in (carried, site):
        each.mkdir()
    wheel = tmp_path / "carried_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("carried_thing.py", "VALUE = 7\n")
        file.writestr("carried_thing-1.0.dist-info/METADATA",
                      "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n")  # fmt: skip
        file.writestr("carried_thing-1.0.dist-info/WHEEL",
                      "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        file.writestr("carried_thing-1.0.dist-info/RECORD", "")
    whole = wheel.read_bytes()
    for place, name in enumerate(("aa", "ab", "ac")):
        part = whole[place * 200 :] if name == "ac" else whole[place * 200 : place * 200 + 200]
        (carried / f"{wheel.name}.part-{name}").write_bytes(part)
    make_site(site, carried)
    assert (site / "carried_thing.py").read_text() == "VALUE = 7\n"


def test_every_dependency_is_looked_for():
    """A machine without an index must say at once what it lacks."""
    from gpu_check import DISTRIBUTIONS, NEEDED, TOP

    modules = {"pyzmq": "zmq", "nvidia-ml-py": None}
    for folder in DISTRIBUTIONS:
        project = tomllib.loads((TOP / folder / "pyproject.toml").read_text())["project"]
        for each in project["dependencies"]:
            name = re.match(r"[\w-]+", each).group()
            module = modules.get(name, name)
            assert name.startswith("hardpoint") or module is None or module in NEEDED, each


def test_an_unknown_step_is_named(tmp_path):
    done = subprocess.run(
        [str(SCRIPT), "--only", "prob"],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no step 'prob': they are probe, greedy" in done.stderr
