"""`hardpoint bench cpu`, with engines that only pretend: what it says, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import gguf
import numpy as np
import pytest
from attrs import evolve
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.identification import read_description
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint
from hardpoint.errors import UnsupportedError
from hardpoint_engine.bench import (
    bandwidth,
    cpu,
    cpu_bounds,
    cpu_table,
    model_files,
    serving_turns,
)
from hardpoint_engine.bench.driver import TransportFailedError

STUB = """
class Engine:
    vocab_size = 2000
    def __init__(self, **options):
        self.options = options
        {start}
    def run(self, prompts, new):
        {run}
        return len(prompts) * new
    def figures(self):
        return {{"ran_s": 2.0, "step_s": 1.6, "weight_bytes": 1e6, "peak_bytes": 2e6}}
    def close(self):
        pass
"""
ROW = {"engine", "format", "phase", "batch", "tokens_per_s", "at"}


class Files:
    """Stands for the model's files."""

    def gguf(self, kind):
        return Path(f"/model.{kind}.gguf")

    def safetensors(self):
        return Path("/model")


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Give every engine a file that pretends; returns what writes another one."""

    def write(name, start="pass", run="pass"):
        path = tmp_path / f"{name}.py"
        path.write_text(STUB.format(start=start, run=run))
        return str(path)

    monkeypatch.setattr(cpu, "ENGINES", {name: write(name) for name in cpu.ENGINES})
    monkeypatch.setattr(cpu, "read_bandwidth", lambda threads: 1e10)
    return write


PLAN = cpu.CpuPlan(
    formats=("fp32", "w8a8", "Q4_0"),
    cases=("B1", "P"),
    repeats=1,
    peers={"llama.cpp": sys.executable, "vllm": sys.executable},
)


def test_there_is_a_row_for_everything(engines):
    found = cpu.measure(PLAN, Files(), lambda line: None)
    assert all(set(row) == ROW for row in found["rows"])
    cells = {
        (row["engine"], row["format"], row["phase"], row["batch"]): row["tokens_per_s"]
        for row in found["rows"]
    }
    kinds = [("hardpoint", kind) for kind in PLAN.formats]
    kinds += [("vllm", "fp32"), ("llama.cpp", "fp32"), ("llama.cpp", "Q4_0")]
    kinds += [("hardpoint", "Q4_0-float")]
    assert set(cells) == {
        (engine, kind, phase, 1) for engine, kind in kinds for phase in ("decode", "prefill")
    }
    assert all(speed > 0 for speed in cells.values())
    assert found["skipped"] == {"transformers": "not named"}
    against = {(each["format"], each["against"]) for each in found["ratios"]}
    assert against == {
        ("fp32", "vllm"), ("w8a8", "vllm"), ("Q4_0", "vllm"), ("fp32", "llama.cpp"),
        ("Q4_0", "llama.cpp"), ("Q4_0-float", "vllm"), ("Q4_0-float", "llama.cpp"),
    }  # fmt: skip
    assert found["turns"] == 1
    bounds = {each["name"]: each for each in found["bounds"]}
    for name in ("w8a8 / vllm, decode B=1", "Q4_0 / llama.cpp, prefill"):
        assert bounds[name]["met"] is (bounds[name]["value"] >= bounds[name]["bound"])
    assert bounds["w8a8: overhead"]["met"] is False
    assert "bf16 / vllm, decode B=1" not in bounds
    assert "w8a8 / vllm, decode B=16" not in bounds
    assert found["figures"]["w8a8"]["overhead"] == pytest.approx(0.25)
    assert json.loads(json.dumps(found)) == found


def test_all_get_the_same_prompts_and_no_two_turns_do(engines, tmp_path, monkeypatch):
    note = f"open({str(tmp_path / 'seen')!r}, 'a').write(repr(prompts) + chr(10))"
    monkeypatch.setattr(cpu, "ENGINES", {name: engines(name, run=note) for name in cpu.ENGINES})
    cpu.measure(
        evolve(PLAN, formats=("fp32",), cases=("B1",), repeats=2), Files(), lambda line: None
    )
    seen = (tmp_path / "seen").read_text().splitlines()
    each = {prompt: seen.count(prompt) for prompt in seen}
    assert sorted(each.values()) == [1, 4, 4, 4]  # ours once more, for its figures


def test_turns_end_when_the_time_is_up(engines, monkeypatch):
    plan = evolve(PLAN, formats=("fp32",), cases=("B1",), repeats=50, peers={}, minutes=1e-9)
    said = []
    found = cpu.measure(plan, Files(), said.append)
    assert (found["turns"], found["cut"]) == (1, "minutes")
    assert "the time is up: the turns that there were count" in said
    assert "cut short by minutes" in cpu_table.table(found)
    whole = cpu.measure(evolve(plan, repeats=2, minutes=60), Files(), said.append)
    assert (whole["turns"], whole["cut"]) == (2, None)


def test_a_bound_whose_peer_is_missing_is_not_measured(engines):
    plan = evolve(PLAN, peers={}, formats=("w8a8", "bf16"))
    found = cpu.measure(plan, Files(), lambda line: None)
    verdicts = {each["name"]: each["met"] for each in found["bounds"] if "vllm" in each["name"]}
    assert set(verdicts.values()) == {None}
    assert {"bf16 / vllm, prefill", "bf16-bfloat16 / vllm, prefill"} < verdicts.keys()
    text = cpu_table.table(found)
    assert text.count("not measured") == len(verdicts) + 4  # and llama.cpp's, of bf16 both ways


def test_a_peer_that_fails_is_left_out_by_name(engines, monkeypatch):
    files = {
        **cpu.ENGINES,
        "vllm": engines("vllm", start="import nowhere_to_be_found"),
        "llama.cpp": engines("llama.cpp", run="raise OSError('no room')"),
    }
    monkeypatch.setattr(cpu, "ENGINES", files)
    found = cpu.measure(evolve(PLAN, formats=("fp32",)), Files(), lambda line: None)
    assert {row["engine"] for row in found["rows"]} == {"hardpoint"}
    assert "nowhere_to_be_found" in found["skipped"]["vllm fp32 eager"]
    assert "no room" in found["skipped"]["llama.cpp fp32"]


def test_our_own_failure_in_every_format_ends_it(engines, monkeypatch):
    bad = engines("hardpoint", start="raise OSError('no room')")
    monkeypatch.setattr(cpu, "ENGINES", {**cpu.ENGINES, "hardpoint": bad})
    with pytest.raises(TransportFailedError, match="no room"):
        cpu.measure(PLAN, Files(), lambda line: None)


def test_an_engine_that_makes_too_few_tokens_is_found_out():
    engine = MagicMock(vocab_size=100)
    engine.run.return_value = 5
    with pytest.raises(serving_turns.WrongCountError):
        serving_turns.Orders(engine).turn(batch=2, length=4, new=3, seed=0)


def row(engine, kind, speed, batch=1, phase="decode"):
    return {
        "engine": engine, "format": kind, "phase": phase, "batch": batch,
        "tokens_per_s": speed, "at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


def test_the_best_way_of_an_engine_counts():
    def runner(way):
        return cpu.Runner(engine="vllm", format="bf16", way=way, arguments="{}")

    times = {runner("eager"): {"B1": [64.0, 32.0, 64.0]}, runner("compiled"): {"B1": [16.0]}}
    (found,) = cpu.rows_of(times, "now")
    assert found["tokens_per_s"] == 4.0


def test_ratios_are_of_the_same_format_of_one_and_of_the_best_of_another():
    rows = [
        row("hardpoint", "Q8_0", 120.0), row("llama.cpp", "Q8_0", 40.0),
        row("llama.cpp", "Q4_0", 100.0), row("vllm", "bf16", 20.0), row("vllm", "fp32", 30.0),
    ]  # fmt: skip
    found = {each["against"]: each["ratio"] for each in cpu.ratios(rows)}
    assert found == {"llama.cpp": 3.0, "vllm": 4.0}
    judged = {
        each["against"]: each.get("met") for each in cpu_bounds.judged_ratios(cpu.ratios(rows))
    }
    assert judged == {"llama.cpp": True, "vllm": None}


def test_shares_of_time_and_bandwidth_are_judged():
    told = {"ran_s": 1.06, "step_s": 1.0, "weight_bytes": 1e8, "peak_bytes": 2e8}
    figures = {
        kind: cpu_bounds.figures_of(told, kind, [row("hardpoint", kind, 150.0)], 2e10)
        for kind in ("bf16", "Q4_0")
    }
    assert figures["bf16"]["read_share"] == 0.75
    assert figures["bf16"]["overhead"] == 0.06
    found = {each["name"]: each["met"] for each in cpu_bounds.judged_figures(figures)}
    assert found == {
        "bf16: overhead": False, "bf16: share of bandwidth": True, "Q4_0: overhead": False
    }  # fmt: skip


def test_memory_is_read_at_some_speed():
    assert 1e8 < bandwidth.read_bandwidth(2, size=4 << 20) < 1e13


def test_the_table_and_the_picture_have_every_figure(tmp_path):
    rows = [row("hardpoint", "bf16", 123.4), row("vllm", "bf16", 45.6, phase="prefill")]
    document = {
        "rows": rows, "ratios": [], "figures": {}, "bounds": [], "read_bytes_per_s": 2e10,
        "skipped": {"llama.cpp": "not named"}, "cores": 2, "turns": 3, "cut": None, "once": [],
    }  # fmt: skip
    text = cpu_table.table(document)
    assert "123.4" in text
    assert "45.6" in text
    assert "left out: llama.cpp: not named" in text
    pyplot, panels = MagicMock(), [[MagicMock(), MagicMock()]]
    pyplot.subplots.return_value = (figure := MagicMock()), panels
    cpu_table.plot(document, str(tmp_path / "x.png"), pyplot)
    drawn = [call.args[1] for panel in panels[0] for call in panel.barh.mock_calls]
    assert drawn == [[123.4], [45.6]]
    assert figure.savefig.call_args.args == (str(tmp_path / "x.png"),)


def test_blocks_are_multiplied_as_llama_cpp_does():
    plan = evolve(PLAN, formats=cpu.FORMATS, peers={})
    for runner in cpu.runners(plan, Files()):
        own = json.loads(runner.arguments)["keys"]["cpu"]
        assert own["native"] == "auto"
        kind, _, named = runner.format.partition("-")
        assert own["activations"] == (named or ("int8" if kind.startswith("Q") else "float"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--formats", "fp32,f8"], "'f8' is none of fp32, bf16"),
        (["--cases", "B2"], "'B2' is none of B1"),
        (["--peer", "vllm"], "'vllm' is not NAME=PYTHON with one of vllm, transformers"),
        (["--peer", "hardpoint=python"], "is not NAME=PYTHON with one of vllm, transformers"),
        (["--plot", "/nonexistent/x.png"], "there is no folder for /nonexistent/x.png"),
        (["--model", "folder"], "name a GGUF file"),
    ],
)
def test_wrong_options_are_named(arguments, words):
    command = [str(Path(sys.executable).with_name("hardpoint")), "bench", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_files_of_every_format_hold_the_same_numbers(small_gguf, tmp_path):
    files = model_files.ModelFiles(small_gguf, tmp_path / "made", lambda line: None)
    reader = gguf.GGUFReader(str(small_gguf))
    wanted = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    for kind, bound in (("F32", 0.0), ("BF16", 4e-3), ("Q8_0", 1e-2), ("Q4_0", 0.2)):
        made = gguf.GGUFReader(str(files.gguf(kind)))
        assert {each.name for each in made.tensors} == set(wanted)
        for each in made.tensors:
            matrix = len(each.shape) > 1
            assert each.tensor_type.name == (kind if matrix else "F32")
            numbers = gguf.dequantize(each.data, each.tensor_type)
            worst = abs(numbers - wanted[each.name]).max()
            assert worst <= bound * abs(wanted[each.name]).max()
    assert read_description(files.gguf("Q4_0")).hidden_size == 64


def test_the_folder_is_a_model_with_rows_in_the_order_of_its_names(small_gguf, tmp_path):
    folder = model_files.ModelFiles(small_gguf, tmp_path / "made", lambda line: None).safetensors()
    description = read_description(folder)
    assert (description.format, description.stored_dtype) == ("safetensors", "bfloat16")
    with SafetensorsCheckpoint(folder) as made, GGUFFile(small_gguf) as stored:
        name = "model.layers.0.self_attn.q_proj.weight"
        halves = np.frombuffer(made.file_of(name).data(name), np.uint16)
        pairs = np.frombuffer(stored.data("blk.0.attn_q.weight"), np.float32)
    halves = (halves.astype(np.uint32) << 16).view(np.float32).reshape(4, 2, 8, 64)
    pairs = pairs.reshape(4, 8, 2, 64).swapaxes(1, 2)
    assert abs(halves - pairs).max() <= 4e-3 * abs(pairs).max()


def test_what_cannot_be_packed_is_named(small_gguf, tmp_path):
    files = model_files.ModelFiles(small_gguf, tmp_path / "made", lambda line: None)
    with pytest.raises(UnsupportedError, match="Q4_K of"):
        files.gguf("Q4_K")
    assert not (tmp_path / "made" / "model.Q4_K.gguf").exists()


@pytest.mark.slow
def test_our_engine_is_measured(small_gguf, tmp_path):
    plan = cpu.CpuPlan(formats=("fp32", "bf16", "Q8_0"), cases=("B16",), repeats=1, threads=1)
    files = model_files.ModelFiles(small_gguf, tmp_path / "made", lambda line: None)
    found = cpu.measure(plan, files, lambda line: None)
    speeds = {row["format"]: row["tokens_per_s"] for row in found["rows"]}
    assert set(speeds) == {"fp32", "bf16", "bf16-bfloat16", "Q8_0", "Q8_0-float"}
    assert min(speeds.values()) > 0
    assert all(each["overhead"] > 0 for each in found["figures"].values())
