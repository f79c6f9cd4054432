"""`hardpoint bench rpc`, with few calls: what it says, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from attrs import evolve
from hardpoint.errors import HardpointError, UnsupportedError
from hardpoint_engine.bench import bounds, checks, driver, rpc, table, turns
from hardpoint_engine.bench.driver import Driver, TransportFailedError, TransportMissingError
from hardpoint_engine.cli import bench_rpc

TINY = rpc.RpcPlan(
    workers=(1, 2),
    sizes=(1024, 2 << 20),
    transports=("hardpoint-mp", "pipe", "zmq", "vllm-mq"),
    rounds=1,
    seconds=0.02,
    calls=3,
    idle_seconds=0.05,
    pythons={"vllm-mq": "/nonexistent/python"},
)
ROW = {"transport", "workers", "bytes", "mode", "median_us", "p99_us", "cpu_s_per_call"}


@pytest.fixture(scope="module")
def document():
    return bench_rpc.measure(TINY, quick=True, checks=False)


def test_there_is_a_row_for_everything(document):
    assert set(document) == {"rows", "idle", "checks"}
    found = [(r["workers"], r["bytes"], r["mode"], r["transport"]) for r in document["rows"]]
    assert sorted(found) == sorted(
        (workers, size, mode, name)
        for workers in (1, 2)
        for size in (1024, 2 << 20)
        for mode in ("busy", "sporadic")
        for name in ("hardpoint-mp", "pipe", "zmq")
    )
    assert json.loads(json.dumps(document)) == document


def test_the_figures_of_a_row_are_possible(document):
    for row in document["rows"]:
        assert set(row) == ROW
        assert 0 < row["median_us"] <= row["p99_us"]
        assert 0 < row["cpu_s_per_call"] < 60


def test_idle_is_told_of_every_transport_and_size_of_group(document):
    found = [(row["transport"], row["workers"]) for row in document["idle"]]
    names = ("hardpoint-mp", "pipe", "zmq")
    assert sorted(found) == sorted((name, workers) for name in names for workers in (1, 2))
    assert all(row["cpu_share"] >= 0 and row["window_s"] >= 0.05 for row in document["idle"])


def test_who_is_not_there_is_left_out_and_named(document):
    assert set(document["checks"]["left_out"]) == {"vllm-mq"}
    assert "/nonexistent/python cannot be run" in document["checks"]["left_out"]["vllm-mq"]


def test_the_table_has_every_figure(document):
    text = table.table(document)
    for row in document["rows"]:
        assert f"{row['median_us']:.1f} / {row['p99_us']:.1f}" in text
    assert "left out: vllm-mq" in text
    assert "1 KiB busy / pipe, 2 workers" in text


def test_the_picture_has_every_median(document, tmp_path):
    pyplot, panels = MagicMock(), [[MagicMock(), MagicMock()], [MagicMock(), MagicMock()]]
    pyplot.subplots.return_value = (figure := MagicMock()), panels
    table.plot(document, str(tmp_path / "x.png"), pyplot)
    drawn = [call.args[1] for line in panels for panel in line for call in panel.plot.mock_calls]
    medians = sorted(row["median_us"] for row in document["rows"])
    assert sorted(median for line in drawn for median in line) == medians
    assert figure.savefig.call_args.args == (str(tmp_path / "x.png"),)


def test_a_turn_begins_when_all_others_are_at_rest(monkeypatch):
    """Some transports spin from their start on, and for a while after each turn."""
    spinning, turns_begun = set(), []

    def watched(name, before, after):
        method = getattr(Driver, name)

        def call(driver, *arguments, **named):
            before(driver, *arguments)
            answer = method(driver, *arguments, **named)
            after(driver, *arguments)
            return answer

        monkeypatch.setattr(Driver, name, call)

    def begin(driver, order):
        if order == "turn":
            turns_begun.append(driver.name)
            assert not spinning - {driver.name}

    def end(driver, order):
        if order == "turn":
            spinning.add(driver.name)

    watched("start", lambda *_: None, lambda driver, _: spinning.add(driver.name))
    watched("settle", lambda *_: None, lambda driver: spinning.discard(driver.name))
    watched("tell", begin, end)
    monkeypatch.setattr(
        rpc._Group, "_measure_idle", lambda _: None
    )  # there, all are awaited at once
    names = ("hardpoint-mp", "pipe")
    rpc.measure(evolve(TINY, sizes=(1024,), transports=names), lambda line: None)
    assert sorted(turns_begun) == sorted(names * 4)


def test_a_wrong_answer_is_an_error():
    sent = turns.payloads(1024, arrays=True)
    how = {"workers": 2, "warm_ups": 0, "calls": 2, "seconds": 5.0, "every": 0.0}
    assert len(turns.take_turn(lambda data: [data[-1]] * 2, sent, **how)["times"]) == 2
    with pytest.raises(turns.WrongAnswerError):
        turns.take_turn(lambda data: [7, 7], sent, **how)
    with pytest.raises(turns.WrongAnswerError):
        turns.take_turn(lambda data: [data[-1]], sent, **how)


def test_large_payloads_are_arrays_where_that_helps():
    (kept, last), (other, _) = turns.payloads(turns.ARRAY, arrays=True)
    assert kept.nbytes == turns.ARRAY
    assert kept[-1] == last != other[-1]
    assert isinstance(turns.payloads(turns.ARRAY, arrays=False)[0][0], bytes)


def broken(tmp_path, monkeypatch, name, body):
    path = tmp_path / "broken.py"
    path.write_text(f"class Transport:\n    arrays = False\n{body}")
    monkeypatch.setitem(driver.FILES, name, str(path))


STARTS_NOT = "    def start(self, workers): raise OSError('no room')\n    def close(self): pass\n"


def test_a_peer_that_fails_is_left_out(tmp_path, monkeypatch):
    broken(tmp_path, monkeypatch, "zmq", STARTS_NOT)
    plan = evolve(TINY, workers=(1,), sizes=(1024,), transports=("pipe", "zmq"))
    found = rpc.measure(plan, lambda line: None)
    assert {row["transport"] for row in found["rows"]} == {"pipe"}
    assert "zmq failed to start: OSError: no room" in found["left_out"]["zmq"]


def test_our_own_failure_ends_it(tmp_path, monkeypatch):
    broken(tmp_path, monkeypatch, rpc.OURS, STARTS_NOT)
    with pytest.raises(TransportFailedError, match="OSError: no room"):
        rpc.measure(evolve(TINY, transports=(rpc.OURS,)), lambda line: None)


def test_a_missing_library_and_a_dead_driver_are_told(tmp_path, monkeypatch):
    for body, kind in (
        ("    def __init__(self): import nowhere_to_be_found\n", TransportMissingError),
        ("    def __init__(self): import os; os._exit(3)\n", TransportFailedError),
    ):
        broken(tmp_path, monkeypatch, "pipe", body)
        process = Driver("pipe")
        try:
            with pytest.raises(kind):
                process.opened()
        finally:
            process.close()


def test_without_matplotlib_nothing_is_measured_for_a_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(rpc, "measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(UnsupportedError, match=r'pip install "hardpoint-engine\[bench\]"'):
        bench_rpc.run(
            quick=True,
            as_json=True,
            plot_path="x.png",
            workers=None,
            transports=(),
            checks=False,
            peers=(),
        )


def test_a_peer_is_run_by_the_interpreter_that_is_named(monkeypatch):
    plans = []

    def noted(plan, tell):
        plans.append(plan)
        raise InterruptedError

    monkeypatch.setattr(rpc, "measure", noted)
    with pytest.raises(InterruptedError):
        bench_rpc.run(
            quick=True,
            as_json=True,
            plot_path=None,
            workers=None,
            transports=(),
            checks=False,
            peers=("vllm=/a/python", "ray=/b/python"),
        )
    wanted = {"vllm-mq": "/a/python", "ray": "/b/python", "ray-graph": "/b/python"}
    assert plans[0].pythons == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1,x"], "numbers of workers, not '1,x'"),
        (["--peer", "vllm"], "'vllm' is not NAME=PYTHON with one of vllm, ray"),
        (["--peer", "zmq=python"], "'zmq=python' is not NAME=PYTHON with one of vllm, ray"),
        (["--transport", "pigeon"], "'pigeon' is none of hardpoint-mp, pipe"),
        (["--plot", "/nonexistent/x.png"], "there is no folder for /nonexistent/x.png"),
    ],
)
def test_wrong_options_are_named(arguments, words):
    command = [str(Path(sys.executable).with_name("hardpoint")), "bench", "rpc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_help_loads_no_engine():
    script = (
        "import sys\n"
        "from hardpoint_engine.cli.bench_command import bench\n"
        "from click.testing import CliRunner\n"
        "assert '--peer NAME=PYTHON' in CliRunner().invoke(bench, ['rpc', '--help']).output\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'cattrs', 'matplotlib', 'cloudpickle', 'zmq'}\n"
        "ours = {'hardpoint_engine.llm', 'hardpoint_engine.bench', 'hardpoint.registry'}\n"
        "print(sorted((heavy | ours) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def row(transport, workers, median, size=1024, mode="busy"):
    return {
        "transport": transport,
        "workers": workers,
        "bytes": size,
        "mode": mode,
        "median_us": median,
    }


def test_bounds_are_judged_where_both_sides_are_there():
    large = 8 << 20
    rows = [
        row(rpc.OURS, 2, 30.0), row("vllm-mq", 2, 100.0), row("pipe", 2, 50.0),
        row(rpc.OURS, 2, 90.0, mode="sporadic"), row("pipe", 2, 90.0, mode="sporadic"),
        row(rpc.OURS, 1, 100.0, large), row(rpc.OURS, 8, 190.0, large),
        row("vllm-mq", 8, 1200.0, large),
    ]  # fmt: skip
    idle = [{"transport": rpc.OURS, "workers": 2, "cpu_share": 0.006}]
    found = bounds.bounds({"rows": rows, "idle": idle, "checks": {"bubble_us": 100.0}})
    assert {each["name"]: each["met"] for each in found} == {
        "1 KiB busy / vllm-mq, 2 workers": True,
        "1 KiB busy / pipe, 2 workers": False,
        "1 KiB sporadic / pipe, 2 workers": True,
        "8 MiB / vllm-mq, 8 workers": True,
        "8 MiB, 8 workers / 1 worker": False,
        "idle share of a core, 2 workers": False,
        "bubble_us": True,
    }


def test_a_death_is_noticed_and_a_pause_is_measured():
    assert 0 < checks.take("kill") < 60
    median, high = checks.take("bubble", "1,12")
    assert 0 < median <= high


def test_a_check_that_cannot_be_made_is_left_out(monkeypatch):
    def fails(name, argument=""):
        raise HardpointError(f"no {name} today")

    monkeypatch.setattr(checks, "take", fails)
    found = checks.measure_checks(checks.QUICK_CHECKS, lambda line: None)
    assert found == {
        "left_out": {
            "sigkill_noticed_ms": "no kill today",
            "bubble_us": "no bubble today",
            "torch_workers_ready_s": "no ready today",
            "first_step_s": "no first-step today",
        }
    }
