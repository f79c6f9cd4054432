"""``hardpoint generate --batch-file``: whole processes, killed and begun again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import HardpointError
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine import LLM
from hardpoint_engine.batch.batch_run import BatchRun
from hardpoint_engine.batch.prompt_file import PromptFile
from hardpoint_engine.batch.result_file import ResultFile
from hardpoint_engine.front import Front

HARDPOINT = str(Path(sys.executable).with_name("hardpoint"))
KEYS = {"platform": "dummy", "load_format": "dummy", "max_model_len": 256}
DUMMY = ("--platform", "dummy", "--load-format", "dummy", "--max-model-len", "256", "--raw")


def command(*arguments) -> list[str]:
    return [HARDPOINT, "generate", *DUMMY, *map(str, arguments)]


def generate(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False
    )


def results(path: Path) -> dict[int, dict]:
    found: dict[int, dict] = {}
    for text in path.read_text().splitlines():
        entry = json.loads(text)
        assert entry["line"] not in found, "a line has two results"
        found[entry["line"]] = entry
    return found


@pytest.fixture
def files(tmp_path):
    return tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"


def test_a_malformed_line_fails_alone_and_parameters_are_a_line_s_own(files):
    prompts, out = files
    lines = [
        {"id": "a", "prompt": "one"},
        {"id": "b", "prompt": "one", "sampling_params": {"max_tokens": 2, "logprobs": 1}},
        {"id": "c", "prompt": "one", "sampling_params": {"max_tokens": 0}},
        {"id": "d", "prompt": "x" * 300},
        {"id": "e", "prompt": "two", "sampling_params": {"n": 2, "temperature": 1, "seed": 3}},
        {"id": "f", "messages": [{"role": "user", "content": "hi"}]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n")
    done = generate("--batch-file", prompts, "--output", out, "--max-tokens", 5)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "hardpoint: 7 prompts, 4 failed" in done.stderr
    found = results(out)
    assert [found[number]["id"] for number in range(1, 8)] == [*"abcdef", None]
    errors = {number: entry["error"] for number, entry in found.items() if "error" in entry}
    assert {number: error["type"] for number, error in errors.items()} == {
        3: "InvalidRequestError",
        4: "InvalidRequestError",
        6: "ChatTemplateError",
        7: "InvalidRequestError",
    }
    assert "max_tokens" in errors[3]["message"]
    assert "300 tokens and the context is 256" in errors[4]["message"]
    with LLM(**KEYS) as llm:
        (expected,) = llm.generate("one", SamplingParams(temperature=0, max_tokens=5))
        (seeded,) = llm.generate("two", SamplingParams(n=2, seed=3, max_tokens=5))
    (answer,) = found[1]["outputs"]
    assert answer["token_ids"] == expected.outputs[0].token_ids
    assert answer["text"] == expected.outputs[0].text
    (answer,) = found[2]["outputs"]
    assert answer["token_ids"] == expected.outputs[0].token_ids[:2]
    assert len(answer["logprobs"]) == 2
    assert [each["token_ids"] for each in found[5]["outputs"]] == [
        each.token_ids for each in seeded.outputs
    ]
    assert found[5]["metrics"]["num_prompt_tokens"] == 3

    before = out.read_bytes()
    again = generate("--batch-file", prompts, "--output", out, "--max-tokens", 5)
    assert again.returncode == 1
    assert "7 of 7 prompts have their result" in again.stderr
    assert "on platform" not in again.stderr  # nothing was started
    assert out.read_bytes() == before


def test_a_run_with_something_else_does_not_mix_its_results_in(files):
    prompts, out = files
    prompts.write_text('{"prompt": "one"}\n')
    arguments = ["--batch-file", prompts, "--output", out, "--max-tokens", 2]
    assert generate(*arguments).returncode == 0
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    before = out.read_bytes()
    for more, words in (
        (["--temperature", "0.5"], "differs in sampling parameters or seed: go on"),
        (["--dtype", "bfloat16", "--seed", "1"], "logits processors) and sampling"),
    ):
        done = generate(*arguments, *more)
        assert done.returncode != 0
        assert words in " ".join(done.stderr.split())
        assert "name another file" in " ".join(done.stderr.split())
        assert out.read_bytes() == before
    assert generate(*arguments, "--max-num-seqs", 1).returncode == 0
    assert sorted(results(out)) == [1, 2]


def test_texts_are_questions_and_need_a_template(files):
    prompts, out = files
    prompts = prompts.with_suffix(".txt")
    prompts.write_text("one\ntwo\n")
    template = prompts.with_name("template.jinja")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}!")
    dummy = [argument for argument in DUMMY if argument != "--raw"]
    arguments = [HARDPOINT, "generate", *dummy, "--batch-file", prompts, "--output", out]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "has no chat template" in done.stderr
    assert out.read_bytes() == b""
    arguments += ["--chat-template", template, "--system", "S", "--max-tokens", "4"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with LLM(**KEYS) as llm:
        expected = llm.generate(["Sone!", "Stwo!"], SamplingParams(temperature=0, max_tokens=4))
    found = results(out)
    assert [found[number]["outputs"][0]["token_ids"] for number in (1, 2)] == [
        result.outputs[0].token_ids for result in expected
    ]


def test_a_run_that_is_killed_at_any_moment_is_gone_on_with(files):
    prompts, out = files
    count = 120
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(count)))
    arguments = command(
        "--batch-file", prompts, "--output", out, "--max-tokens", 4, "--max-num-seqs", 4,
        "--set", "plugins.dummy.step_seconds=0.005",
    )  # fmt: skip
    draw = random.Random(3)
    had, kills = 0, 0
    while kills < 3 and had < count:
        wanted = min(count, had + draw.randint(1, 30))
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and out.read_bytes().count(b"\n") >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        process.communicate(timeout=60)
        kills += process.returncode == -signal.SIGKILL
        data = out.read_bytes()
        had = data.count(b"\n")
        assert had >= wanted
        if kills == 1:  # as if the kill had come in the middle of writing
            out.write_bytes(data + b'{"line": 119, "digest": "')
    assert kills == 3
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{had} of {count} prompts have their result" in done.stderr
    found = results(out)
    assert sorted(found) == list(range(1, count + 1))
    with LLM(**KEYS) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=4)
        expected = llm.generate([f"{i}" for i in range(count)], sampling)
    assert [found[i + 1]["outputs"][0]["token_ids"] for i in range(count)] == [
        result.outputs[0].token_ids for result in expected
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--batch-file", "p.txt"], 2, "needs --output"),
        (["--batch-file", "p.txt", "--output", "p.txt"], 2, "is the file of prompts"),
        (["--batch-file", "none", "--output", "o"], 2, "is not a file"),
        (["--batch-file", "p.txt", "--output", "o", "hello"], 2, "neither PROMPT nor --json"),
        (["--output", "o", "hello"], 2, "--output is for --batch-file"),
        ([], 2, "Missing argument 'PROMPT...'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path, monkeypatch, capsys, arguments, code, words
):
    from hardpoint.cli import main

    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("one\n")
    with pytest.raises(SystemExit) as end:
        main(["generate", *DUMMY, *arguments])
    assert end.value.code == code
    assert words in capsys.readouterr().err
    assert Path("p.txt").read_text() == "one\n"


@pytest.fixture
def front():
    started = []

    def start(**keys) -> Front:
        config = load_config(overrides={**KEYS, **keys}, environ={})
        started.append(Front(config, chat=False))
        return started[-1]

    yield start
    for each in started:
        each.shutdown(10)


def batch(front, prompts, out, told=lambda tokens: None):
    sampling = SamplingParams(temperature=0, max_tokens=3)
    with ResultFile(str(out), run="a-b-c", lines=500) as results:
        run = BatchRun(
            front, PromptFile(str(prompts), sampling), results,
            conversation=None, show=lambda result, prompt: {"n": result.outputs[0].token_ids},
            told=told,
        )  # fmt: skip
        run.run()
    return run


def test_the_engine_never_has_more_than_a_window(front, files):
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": "a"}) + "\n" for _ in range(500)))
    engine = front(max_num_seqs=4)
    most = 0

    def told(tokens: int) -> None:
        nonlocal most
        most = max(most, len(engine.core.scheduler.roster), len(engine.thread._calls))

    run = batch(engine, prompts, out, told)
    assert run.window == 8
    assert 4 <= most <= 8
    assert len(results(out)) == 500


def test_a_line_is_tried_again_when_its_step_fails(front, files):
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(10)))
    engine = front(max_num_seqs=4, plugins={"dummy": {"fail_at": "step:5"}})
    batch(engine, prompts, out)
    found = results(out)
    assert len(found) == 10
    assert not any("error" in entry for entry in found.values())


def test_a_line_whose_steps_always_fail_is_an_error(front, files):
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    points = ",".join(f"step:{number}" for number in range(1, 40))
    engine = front(max_num_seqs=1, plugins={"dummy": {"fail_at": points}})
    batch(engine, prompts, out)
    found = results(out)
    assert [found[number]["error"]["type"] for number in range(1, 5)]


def test_whatever_a_line_raises_is_its_own_error(front, files, monkeypatch):
    """A plugin's check of a request, say, may raise anything."""
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    engine = front()
    right = engine.core.check_request

    def check(request) -> None:
        if request.prompt == (ord("2"),):
            raise KeyError("no such word")
        right(request)

    monkeypatch.setattr(engine.core, "check_request", check)
    batch(engine, prompts, out)
    found = results(out)
    assert found[3]["error"] == {"type": "KeyError", "message": "'no such word'"}
    assert [number for number in found if "error" in found[number]] == [3]
    out.unlink()
    engine.shutdown(10)
    with pytest.raises(HardpointError):  # an engine that has ended is no line's fault
        batch(engine, prompts, out)
    assert results(out) == {}


def test_a_line_that_raises_when_it_is_tried_again_is_an_error(front, files, monkeypatch):
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    engine = front(max_num_seqs=1, plugins={"dummy": {"fail_at": "step:1"}})
    right, seen = engine.core.check_request, set()

    def check(request) -> None:
        if request.prompt in seen:
            raise KeyError("once is enough")
        seen.add(request.prompt)
        right(request)

    monkeypatch.setattr(engine.core, "check_request", check)
    batch(engine, prompts, out)
    found = results(out)
    assert sorted(found) == [1, 2, 3, 4]
    assert found[1]["error"]["type"] == "KeyError"


def test_an_engine_that_is_lost_is_no_line_s_fault(front, files):
    prompts, out = files
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    faults = {"plugins": {"dummy": {"fail_at": "step:5=kill"}}}
    with pytest.raises(HardpointError):
        batch(front(max_num_seqs=1, executor="mp", **faults), prompts, out)
    assert len(results(out)) == 1
    batch(front(), prompts, out)
    assert len(results(out)) == 4
    assert not any("error" in entry for entry in results(out).values())
