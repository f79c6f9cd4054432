"""``hardpoint bench latency`` and ``throughput``: every figure is there, and made of what ran."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hardpoint.cli import main
from hardpoint_engine import LLM
from hardpoint_engine.bench import serving, table
from hardpoint_engine.bench.serving import LATENCY, THROUGHPUT, line_of, measure

DUMMY = ("--platform", "dummy", "--load-format", "dummy", "--max-model-len", "256")
FIGURES = {
    "batch_size", "num_iters", "median_latency_s", "p90_latency_s", "median_ttft_ms",
    "median_tpot_ms", "request_throughput", "output_throughput", "total_token_throughput",
    "num_preemptions",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with LLM(platform="dummy", load_format="dummy", max_model_len=256) as llm:
        yield llm


def test_every_run_computes_all_of_its_tokens_anew(llm):
    before = llm.metrics.computed_tokens, llm.metrics.cached_tokens
    plan = evolve(LATENCY, counts=(1, 3), input_len=40, output_len=4, num_iters=2)
    told = []
    document = measure(llm, plan, "latency", told.append)
    assert [row["batch_size"] for row in document["rows"]] == [1, 3]
    assert told == [line_of(row) for row in document["rows"]]
    computed = llm.metrics.computed_tokens - before[0]
    assert computed == (1 + 3) * 3 * (40 + 4 - 1)
    assert llm.metrics.cached_tokens == before[1]
    for row in document["rows"]:
        assert set(row) == FIGURES
        assert row["num_iters"] == 2
        assert row["total_token_throughput"] == pytest.approx(11 * row["output_throughput"])
        assert row["output_throughput"] == pytest.approx(4 * row["request_throughput"])
        assert 0 < row["median_ttft_ms"] <= row["p90_latency_s"] * 1e3


def test_lengths_of_throughput_are_mixed_and_the_same_in_each_run(llm):
    plan = evolve(THROUGHPUT, counts=(8,), input_len=20, output_len=8, num_iters=1)
    draws = []
    for _ in range(2):
        draw = serving.random.Random(serving.SEED)
        _, results = serving._run(llm, plan, 8, draw)
        draws.append([(len(r.prompt_token_ids), len(r.outputs[0].token_ids)) for r in results])
    assert draws[0] == draws[1]
    prompts, outputs = zip(*draws[0], strict=True)
    assert len(set(prompts)) > 2
    assert all(10 <= length <= 30 for length in prompts)
    assert all(4 <= length <= 12 for length in outputs)


@pytest.mark.parametrize(
    ("name", "counted"), [("latency", "batch_size"), ("throughput", "num_prompts")]
)
def test_the_command_prints_a_document(name, counted, capsys):
    flag = "--" + counted.replace("_", "-")
    arguments = (flag, "1,2", "--num-iters", "1", "--output-len", "3", "--input-len")
    with pytest.raises(SystemExit) as end:
        main(["bench", name, *DUMMY, *arguments, "4", "--json"])
    assert not end.value.code
    out, errors = capsys.readouterr()
    document = json.loads(out)
    assert (document["bench"], document["platform"], document["executor"]) == (name, "dummy", "uni")
    assert [row[counted] for row in document["rows"]] == [1, 2]
    assert "2 requests:" in errors


def test_a_person_gets_each_line_once(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "latency", *DUMMY, "--batch-size", "2,1", "--num-iters", "1"])
    assert not end.value.code
    out, errors = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["2", "requests:"],
        ["1", "request:"],
    ]
    assert "request:" not in errors


def test_a_picture_is_drawn(llm, tmp_path):
    picture = tmp_path / "figures.png"
    plan = evolve(LATENCY, counts=(1, 2), input_len=4, output_len=3, num_iters=1)
    document = measure(llm, plan, "latency", lambda line: None)
    serving.plot(document, str(picture), table.plotting())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", "1,x"), "numbers of requests, not '1,x'"),
        (("--num-iters", "0"), "0 is not in the range"),
        (("--plot", "/none/at/all.png"), "there is no folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "latency", *DUMMY, *arguments])
    assert end.value.code == 2
    out, errors = capsys.readouterr()
    assert words in errors
    assert "on platform" not in out + errors


def test_help_promises_peers_only_where_there_are_any(capsys):
    told = {}
    for name in ((), ("rpc",), ("latency",), ("throughput",)):
        with pytest.raises(SystemExit):
            main(["bench", *name, "--help"])
        told[name] = " ".join(capsys.readouterr().out.split())
    assert "rpc beside its peers, latency and throughput by itself" in told[()]
    assert "Ray's actors" in told[("rpc",)]
    assert "peers" not in told[("latency",)] + told[("throughput",)]
