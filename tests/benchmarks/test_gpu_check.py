"""``benchmarks/gpu_check.sh`` where no GPU is: a dry run, and the reason otherwise."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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
    found = run(tmp_path, "--dry-run", "--only", "collectives,streams,sleep,probe,pools")
    assert list(found) == ["pools", "probe", "sleep", "streams", "collectives"]
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert outcomes.pop("streams") == "skipped"
    assert set(outcomes.values()) == {"ok"}, found
    assert found["pools"]["freed"] >= 64 << 20
    assert found["pools"]["left in the pool"] == 0
    probe = found["probe"]
    assert 0 < probe["held"] <= probe["total"]
    assert probe["profile"]["available"] > 0
    assert probe["profile"]["graphs"] == probe["graphs"]["set aside"] > 0
    assert probe["graphs"]["taken"] > 0
    assert set(found["sleep"]) >= {"level 1", "level 2"}
    assert found["streams"]["reason"] == "host memory has no streams"


@pytest.mark.slow
def test_every_step_runs_on_host_memory(tmp_path):
    from gpu_check import STEPS

    found = run(tmp_path, "--dry-run")
    assert list(found) == list(STEPS)
    bad = {n: each for n, each in found.items() if each["outcome"] != "ok" and n != "streams"}
    assert not bad
    for mode in ("full_and_piecewise", "piecewise"):
        assert found["graphs"][mode]["steps"]["PIECEWISE"] >= 1
    assert found["graphs"]["full"]["sizes"] == [1, 2, 4, 128]
    assert found["graphs"]["full"]["eager_tokens"] == []


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU may be here")
def test_without_a_gpu_every_step_says_so(tmp_path):
    from gpu_check import NO_GPU, STEPS

    found = run(tmp_path)
    assert list(found) == list(STEPS)
    assert {(each["outcome"], each["reason"]) for each in found.values()} == {("skipped", NO_GPU)}


def options_of(out):
    return argparse.Namespace(dry_run=True, model=None, out=out, no_sleep="")


def test_a_step_that_outlasts_its_time_leaves_a_line(tmp_path):
    """No step begins, computes and ends within a twentieth of a second."""
    from gpu_check import run_step

    line = run_step("probe", 0.05, options_of(tmp_path), dict(os.environ))
    assert (line["step"], line["outcome"], line["reason"]) == ("probe", "timeout", "above 0 s")
    assert line["so_far"] == {}


def test_a_step_that_told_its_outcome_and_does_not_end_keeps_it(tmp_path, monkeypatch):
    """As libraries that hang while the interpreter ends."""
    import threading

    import gpu_check

    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "gpu_steps.py"
    script.write_text(
        'import time\nprint(\'{"outcome": "ok", "x": 1}\', flush=True)\ntime.sleep(3600)\n'
    )
    monkeypatch.setattr(gpu_check, "TOP", tmp_path)
    told = threading.Event()

    class UntilTold(subprocess.Popen):
        def wait(self, timeout=None):
            if told.is_set():
                return super().wait(timeout)
            while self.poll() is None and '"x"' not in (tmp_path / gpu_check.LOG).read_text():
                told.wait(0.02)
            told.set()
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", UntilTold)
    line = gpu_check.run_step("probe", 600, options_of(tmp_path), dict(os.environ))
    assert (line["outcome"], line["x"], line["did_not_end_in_seconds"]) == ("ok", 1, 600)


LEAVES_ONE = """
import os, subprocess, sys, time
orphan = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
)
open(sys.argv[0] + ".pid", "w").write(str(orphan.pid))
os.write(1, b"\\xff cut\\n")
os.write(2, b"\\xff said\\n")
print('{"outcome": "%s"}' % os.environ["OUTCOME"])
"""


@pytest.mark.parametrize("outcome", ["ok", "failed"])
def test_whom_a_step_leaves_behind_is_ended_and_spoils_nothing(tmp_path, monkeypatch, outcome):
    """In a session of his own, with the step's streams: as a worker that outlives its engine."""
    import gpu_check

    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "gpu_steps.py"
    script.write_text(LEAVES_ONE)
    monkeypatch.setattr(gpu_check, "TOP", tmp_path)
    monkeypatch.setattr(gpu_check, "GRACE", 0.2)
    environment = {**os.environ, "OUTCOME": outcome}
    line = gpu_check.run_step("probe", 600, options_of(tmp_path), environment)
    assert line["outcome"] == outcome
    assert line["processes_left_behind"] == 1
    assert not Path(f"/proc/{(tmp_path / 'benchmarks/gpu_steps.py.pid').read_text()}").exists()
    if outcome == "failed":
        assert "said" in line["stderr"]


TELLS_AND_STAYS = """
import sys, time
if sys.argv[1] == "pools":
    print('{"outcome": "ok", "x": 1}', flush=True)
else:
    print('{"x": 2}', flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_cut_leaves_what_was_found_and_nobody(tmp_path, sent):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("gpu_check.sh", "gpu_check.py"):
        shutil.copy(SCRIPT.with_name(name), folder)
    (folder / "gpu_steps.py").write_text(TELLS_AND_STAYS)
    script = subprocess.Popen(
        [str(folder / SCRIPT.name), "--dry-run", "--out", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    log = tmp_path / "gpu_check.log"
    waited_for(lambda: log.is_file() and '"x": 2' in log.read_text())
    (step,) = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    script.send_signal(sent)
    code = script.wait(timeout=120)
    waited_for(lambda: not Path(f"/proc/{step}").exists())
    told = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert (told[0]["step"], told[0]["outcome"], told[0]["x"]) == ("pools", "ok", 1)
    if sent == signal.SIGKILL:
        assert (code, len(told)) == (-9, 1)
    else:
        assert (code, len(told)) == (1, 2)
        assert (told[1]["step"], told[1]["outcome"], told[1]["so_far"]) == (
            "probe",
            "cut",
            {"x": 2},
        )


def waited_for(condition):
    """Wait until it holds, two minutes at most."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_all_steps_fit_and_later_ones_get_what_is_left():
    from gpu_check import STEPS, limit

    names = list(STEPS)
    assert sum(STEPS.values()) <= 480
    assert limit("pools", names, 480) == STEPS["pools"] + 480 - sum(STEPS.values())
    assert limit("greedy", names, 480) > STEPS["greedy"]
    assert limit("transformers", names, 400) == 400
    assert limit("speed", names, 20) == 20
    assert limit("speed", names, 100) == STEPS["speed"]


def test_an_engine_that_cannot_have_memory_that_sleeps_starts_without(tmp_path, monkeypatch):
    import hardpoint_engine
    from gpu_house import House

    started = []

    def start(**keys):
        started.append(keys.get("plugins"))
        if not keys.get("plugins"):
            raise OSError("cuMemCreate: not supported")
        return "an engine"

    monkeypatch.setattr(hardpoint_engine, "LLM", start)
    house = House("somewhere", dry=False, scratch=tmp_path)
    assert house.start() == house.start() == "an engine"
    assert started == [None, {"cuda": {"sleep": "off"}}, {"cuda": {"sleep": "off"}}]
    assert house.no_sleep == "OSError: cuMemCreate: not supported"
    with pytest.raises(OSError, match="cuMemCreate"):
        house.start(must_sleep=True)


def test_other_ids_are_told_with_their_place():
    from gpu_steps import _shared

    assert _shared([7, 8], [1, 2, 3], [1, 2, 4]) == (2, 2, [7, 8, 1, 2])


def test_what_a_killed_step_had_found_is_read_back():
    from gpu_check import last_object

    assert last_object('warning\n{"full": 1}\n{"full": 1, "piecewise": 2}\n[3]\n{"cut') == {
        "full": 1, "piecewise": 2,
    }  # fmt: skip
    assert last_object("nothing\n") == {}


def test_wheels_in_parts_are_put_together(tmp_path):
    """As a machine gets them whose loans carry less than the default model; without pip."""
    from gpu_check import make_site

    carried, site = tmp_path / "carried", tmp_path / "site"
    for each in (carried, site):
        each.mkdir()
    wheel = tmp_path / "carried_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("carried_thing/__init__.py", "VALUE = 7\n")
        file.writestr("carried_thing-1.0.data/platlib/carried_thing/other.py", "VALUE = 8\n")
        file.writestr("carried_thing-1.0.dist-info/METADATA",
                      "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n")  # fmt: skip
    whole = wheel.read_bytes()
    for place, name in enumerate(("aa", "ab", "ac")):
        part = whole[place * 200 :] if name == "ac" else whole[place * 200 : place * 200 + 200]
        (carried / f"{wheel.name}.part-{name}").write_bytes(part)
    make_site(site, carried)
    assert (site / "carried_thing/__init__.py").read_text() == "VALUE = 7\n"
    assert (site / "carried_thing/other.py").read_text() == "VALUE = 8\n"


@pytest.mark.parametrize("content", [b"no wheel", None])
def test_what_cannot_be_unpacked_is_a_line(tmp_path, content):
    carried = tmp_path / "carried"
    carried.mkdir()
    if content is not None:
        (carried / "cut-1.0-py3-none-any.whl").write_bytes(content)
    found = run(tmp_path, "--dry-run", "--wheels", str(carried), code=1)
    assert list(found) == ["environment"]
    assert found["environment"]["outcome"] == "error"
    assert ("cut-1.0" if content else "no wheels in") in found["environment"]["reason"]


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
    assert "no step 'prob': they are pools, probe, greedy" in done.stderr
