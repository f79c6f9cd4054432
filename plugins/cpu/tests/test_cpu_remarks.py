"""Who asks for a model that runs through torch is told so: by the doctor, and once by a run."""

from __future__ import annotations

import json

import pytest
from hardpoint.cli import main
from hardpoint_cpu.native import library
from hardpoint_engine import SamplingParams
from native_models import PROMPTS, engine

SLOW = "through torch instead of a native program"


@pytest.fixture
def diagnosed(capsys):
    """What the doctor remarks on a run with a model, as data and as text."""

    def diagnose(folder, *options: str) -> tuple[list[str], str]:
        arguments = ["doctor", "--platform", "cpu", "--model", str(folder), *options]
        capsys.readouterr()
        outputs = []
        for more in (["--json"], []):
            with pytest.raises(SystemExit) as ended:
                main([*arguments, *more])
            assert ended.value.code == 0
            outputs.append(capsys.readouterr().out)
        report = json.loads(outputs[0])
        assert report["selected"]["error"] is None
        return report["remarks"], outputs[1]

    return diagnose


@pytest.fixture
def foreign(checkpoint, tmp_path):
    """A model whose architecture is not built in, as far as a description tells."""
    for path in checkpoint("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["architectures"] = ["OlmoForCausalLM"]
    settings["model_type"] = "olmo"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def test_the_doctor_says_why_a_model_is_not_lowered(checkpoint, foreign, diagnosed):
    if not library.availability().levels:
        pytest.skip("there is no library")
    assert diagnosed(checkpoint("llama"))[0] == []
    (remark,), text = diagnosed(foreign)
    assert SLOW in remark
    assert "OlmoForCausalLM is an architecture that is not lowered yet. A model of" in remark
    assert f"Mind: {remark}" in text
    (graphs,), _ = diagnosed(
        checkpoint("llama"), "--set", "graph_mode=full", "--set", "graph_sizes=1,2"
    )
    assert "graph_sizes is set" in graphs
    assert "Leave that key out" in graphs
    assert diagnosed(foreign, "--set", "plugins.cpu.native=off")[0] == []
    assert diagnosed(checkpoint("llama"), "--set", "graph_mode=none")[0] == []


def test_the_doctor_says_that_there_is_no_library(checkpoint, monkeypatch, diagnosed):
    absent = library.Availability(reason="no native library: there was no C++ compiler")
    monkeypatch.setattr(library, "availability", lambda: absent)
    (remark,), _ = diagnosed(checkpoint("llama"))
    assert "there was no C++ compiler. Install hardpoint-cpu again" in remark


def test_a_run_of_two_workers_warns_once(checkpoint, capfd):
    """The warning shows at the level that a run has by itself."""
    keys = {"graph_mode": "full", "graph_sizes": [1, 2], "max_num_seqs": 2}
    with engine(checkpoint("llama"), "auto", tensor_parallel_size=2, executor="mp", **keys) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
    said = capfd.readouterr().err
    assert said.count(SLOW) == 1, said
