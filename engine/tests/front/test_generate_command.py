"""``hardpoint generate`` as a person meets it: whole processes, real pipes, real signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hardpoint.cli import main

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
DUMMY = ("--platform", "dummy", "--load-format", "dummy", "--max-model-len", "256")


def begin(*arguments: str, **more) -> subprocess.Popen:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [HARDPOINT, "generate", *arguments],
        stdin=more.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        **more,
    )


def generate(*arguments: str, data: bytes | None = None, **more) -> tuple[int, str, str]:
    """Run the command to its end; return exit code, standard output, standard error."""
    process = begin(*arguments, stdin=subprocess.PIPE if data is not None else None, **more)
    out, errors = process.communicate(data, timeout=60)
    return process.returncode, out.decode(), errors.decode()


def test_only_the_answer_goes_to_standard_output():
    code, out, errors = generate(*DUMMY, "--raw", "--max-tokens", "5", "one", "two")
    assert code == 0
    assert errors.splitlines()[0] == "hardpoint: dummy on platform dummy, executor uni"
    code, again, _ = generate(*DUMMY, "--raw", "--max-tokens", "5", "one", "two", "--json")
    assert code == 0
    texts = [result["text"] for result in json.loads(again)["results"]]
    assert out == "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)


def test_json_is_one_document():
    arguments = ("--raw", "--json", "--max-tokens", "5", "--executor", "uni", "one", "-")
    code, out, _ = generate(*DUMMY, *arguments, data="two 🙂\n".encode())
    assert code == 0
    content = json.loads(out)
    assert set(content) == {"results", "platform", "executor", "model"}
    assert (content["platform"], content["executor"]) == ("dummy", "uni")
    assert [result["prompt"] for result in content["results"]] == ["one", "two 🙂"]
    for result in content["results"]:
        assert set(result) == {"prompt", "text", "token_ids", "finish_reason", "metrics"}
        assert len(result["token_ids"]) == 5
        assert result["finish_reason"] == "length"
        assert result["metrics"]["num_generation_tokens"] == 5
        assert result["metrics"]["time_to_first_token"] > 0


def test_scores_are_in_the_document_when_asked_for():
    arguments = ("--raw", "--json", "--max-tokens", "3", "one")
    scores = ("--logprobs", "2", "--prompt-logprobs", "1")
    code, out, _ = generate(*DUMMY, *arguments, *scores)
    assert code == 0
    (result,) = json.loads(out)["results"]
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert set(entry) == {"token_id", "token", "logprob", "rank", "top"}
        assert [other["rank"] for other in entry["top"]] == [1, 2]
        assert set(entry["top"][0]) == {"token_id", "token", "logprob", "rank"}
    first, *others = result["prompt_logprobs"]
    assert first is None
    assert [entry["token_id"] for entry in others] == list(b"ne")
    code, out, _ = generate(*DUMMY, *arguments, "--logprobs", "0")
    (result,) = json.loads(out)["results"]
    assert [entry["top"] for entry in result["logprobs"]] == [[], [], []]
    assert "prompt_logprobs" not in result


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_scores_without_a_document_are_refused(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", *DUMMY, "--raw", flag, "2", "one"])
    out, errors = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert f"{flag} is shown with --json only" in errors


def test_several_answers_to_a_prompt_are_numbered():
    code, out, _ = generate(*DUMMY, "--raw", "--json", "--max-tokens", "3", "--n", "2", "a", "b")
    assert code == 0
    found = [(result["prompt"], result["index"]) for result in json.loads(out)["results"]]
    assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_each_of_several_answers_has_its_prompt_above_it():
    long = "two\nlines " + "x" * 100
    code, _, errors = generate(*DUMMY, "--raw", "--max-tokens", "2", "one", long)
    assert code == 0
    shown = [line for line in errors.splitlines() if line.startswith("==")]
    assert shown[0] == "== one"
    assert shown[1].startswith("== two lines xxx")
    assert shown[1].endswith("xxx...")
    assert len(shown[1]) < 80
    for arguments in (("one",), ("one", "two", "--json")):
        _, _, errors = generate(*DUMMY, "--raw", "--max-tokens", "2", *arguments)
        assert "==" not in errors


def test_the_choice_is_told_before_anything_is_loaded():
    code, _, errors = generate(*DUMMY, "--raw", "--set", "plugins.dummy.fail_at=load", "one")
    assert code == 1
    assert errors.splitlines()[0] == "hardpoint: dummy on platform dummy, executor uni"
    assert "hardpoint: platform" not in errors  # nobody else was a candidate


def test_every_candidate_of_an_automatic_choice_is_told():
    _, _, errors = generate("--raw", "--set", "max_model_len=0", "one")
    assert "hardpoint: platform" not in errors
    chosen = ("--load-format", "dummy", "--set", "plugins.cpu.threads=9999")  # refused later
    code, _, errors = generate("--raw", *chosen, "one")
    assert code == 2
    told = [line for line in errors.splitlines() if line.startswith("hardpoint: platform ")]
    assert any(line.startswith("hardpoint: platform cpu is available: ") for line in told)
    assert any(line.startswith("hardpoint: platform dummy is for use by name: ") for line in told)
    rest = [line for line in errors.splitlines() if line not in told]
    rest = [line for line in rest if "the probe of platform" not in line]  # it was slow
    assert rest[0] == "hardpoint: dummy on platform cpu, executor uni"


def test_what_the_platform_refuses_is_refused_before_anything_is_loaded():
    """A worker that starts would end it otherwise, with another code."""
    script = (
        "from hardpoint_uniproc.executor import UniProcExecutor\n"
        "UniProcExecutor.start_workers = lambda self: exit(9)\n"
        "from hardpoint.cli import main\n"
        "main(['generate', '--platform', 'dummy', '--load-format', 'dummy', '--raw', 'one',"
        " '--bad-words', 'x'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad_words" in done.stderr
    assert "request 0" not in done.stderr


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_is_told_in_one_paragraph(more):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [HARDPOINT, "generate", *DUMMY, "--raw", *more, "one"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr


def test_each_token_is_flushed_into_a_pipe():
    slow = ("--set", "plugins.dummy.step_seconds=0.3", "--max-tokens", "200")
    process = begin(*DUMMY, "--raw", *slow, "one")
    try:
        first = os.read(process.stdout.fileno(), 64)
        assert first
        assert len(first) < 64
        assert process.poll() is None  # more than a minute's work is left
        assert os.read(process.stdout.fileno(), 64)
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


ERRORS = {
    "empty prompt": (["--raw", ""], "prompt is empty"),
    "blank question": ([" \n"], "prompt is empty"),
    "second prompt empty": (["--raw", "a", ""], "prompt 2 of 2 is empty"),
    "no chat template": (["one"], "no chat template"),
    "prompt too long": (["--raw", "x" * 300], "context"),
    "value out of range": (["--raw", "--temperature", "3", "one"], "temperature must be a number"),
    "not a number": (["--raw", "--top-p", "much", "one"], "top_p must be a number, not 'much'"),
    "unknown key": (["--raw", "--set", "max_num_seq=3", "one"], "max_num_seqs"),
    "unknown flag": (["--raw", "--temprature", "1", "one"], "--temperature"),
    "unknown executor": (["--raw", "--executor", "unni", "one"], "uni"),
    "wrong choice": (["--raw", "--dtype", "float8", "one"], "auto, float32, bfloat16"),
    "no such file": (["--raw", "--config", "/nonexistent.toml", "one"], "no such file"),
    "no such tokenizer": (["--raw", "--tokenizer", "/nonexistent", "one"], "no such file"),
    "load fails": (["--raw", "--set", "plugins.dummy.fail_at=nonsense", "one"], "fail_at"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_paragraph(case, capsys):
    arguments, words = ERRORS[case]
    with pytest.raises(SystemExit) as end:
        main(["generate", *DUMMY, *arguments])
    out, errors = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert words in errors
    assert "Traceback" not in errors
    assert "\n\n" not in errors.strip() or case == "unknown flag"


def test_bad_input_ends_a_process_with_2():
    code, out, errors = generate(*DUMMY, "--raw", "x" * 300)
    assert (code, out) == (2, "")
    assert "context" in errors
    assert "Traceback" not in errors


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip

SHAPES = {
    "model.embed_tokens": [64, 16], "model.norm": [16], "lm_head": [64, 16],
    "model.layers.0.input_layernorm": [16], "model.layers.0.post_attention_layernorm": [16],
    **{f"model.layers.0.self_attn.{name}_proj": [16, 16] for name in "qkvo"},
    "model.layers.0.mlp.gate_proj": [32, 16], "model.layers.0.mlp.up_proj": [32, 16],
    "model.layers.0.mlp.down_proj": [16, 32],
}  # fmt: skip


def write_model(folder: Path, architecture: str) -> None:
    """A folder with everything but a tokenizer; all weights are zero."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": [architecture]}))
    header, end = {}, 0
    for name, shape in SHAPES.items():
        begin, end = end, end + 4 * math.prod(shape)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        header[f"{name}.weight"] = entry
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("AcmeForCausalLM", "supported are"), ("LlamaForCausalLM", "tokenizer.json")],
)
def test_a_model_is_blamed_before_its_tokenizer(architecture, words, tmp_path, capsys):
    write_model(tmp_path, architecture)
    with pytest.raises(SystemExit) as end:
        main(["generate", "--platform", "cpu", "--model", str(tmp_path), "one"])
    out, errors = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert words in errors.splitlines()[-1]


def test_bytes_that_are_no_text_are_refused():
    code, out, errors = generate(*DUMMY, "--raw", "-", data=b"\xff\xfe")
    assert (code, out) == (2, "")
    assert "not UTF-8" in errors


def test_a_worker_that_fails_is_told_without_its_traceback():
    code, out, errors = generate(*DUMMY, "--raw", "--set", "plugins.dummy.fail_at=step:2", "one")
    assert (code, out[-1:]) == (1, "\n")  # the answer's line was begun
    assert "worker rank 0 failed" in errors
    assert "injected fault" in errors
    assert "Traceback" not in errors


def test_the_log_of_level_info_has_the_traceback_of_a_worker_that_fails():
    fault = ("--set", "plugins.dummy.fail_at=step:2", "--log-level", "info")
    code, _, errors = generate(*DUMMY, "--raw", *fault, "one")
    assert code == 1
    log, _, said = errors.rpartition("worker rank 0 failed")
    assert "Traceback (most recent call last)" in log
    assert 'faults.py", line ' in log
    assert "Traceback" not in said


def test_no_model_tells_both_ways_out():
    script = (
        "from hardpoint import default_model\n"
        "default_model.DISTRIBUTION = 'no-such-distribution'\n"
        "from hardpoint.cli import main\n"
        "main(['generate', 'one'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--model" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


SLOW = {
    "load": ("--set", "plugins.dummy.load_seconds=60"),
    "step": ("--set", "plugins.dummy.step_seconds=60"),
    "hang": ("--set", "plugins.dummy.fail_at=step:1=hang"),
}


@pytest.mark.parametrize("what", SLOW)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_ends_it_within_a_second(what, number, code):
    process = begin(*DUMMY, "--raw", *SLOW[what], "one")
    if what == "load":
        wait_until(
            lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1
        )  # the worker's thread
    else:
        assert b"dummy" in process.stderr.readline()  # it is about to generate
    begun = time.monotonic()
    process.send_signal(number)
    out, errors = process.communicate(timeout=30)
    took = time.monotonic() - begun
    assert (process.returncode, out) == (code, b"")
    assert b"Traceback" not in errors
    assert took < 5  # a minute's work was ahead; 0.5 s on a machine that is free


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_that_leaves_ends_it_quietly():
    slow = ("--set", "plugins.dummy.step_seconds=0.05", "--max-tokens", "200")
    process = begin(*DUMMY, "--raw", *slow, "one")
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 141
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors
