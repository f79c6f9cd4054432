"""``hardpoint generate`` as a person meets it: whole processes, real pipes, real signals."""

from __future__ import annotations

import json
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
        assert result["metrics"]["num_output"] == 5
        assert result["metrics"]["time_to_first_token"] > 0


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


def test_no_model_tells_both_ways_out():
    script = (
        "from hardpoint_engine import default_model\n"
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
