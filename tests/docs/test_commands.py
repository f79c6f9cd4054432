"""The commands of the pages run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands_of(page: str) -> list[list[str]]:
    found = re.findall(r"^    (hardpoint .*)$", (DOCS / page).read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def run(command: list[str], folder: Path, typed: str = "") -> str:
    program = str(Path(sys.executable).parent / command[0])
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, input=typed, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_on_many_prompts(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name a river.", "id": 7}\n')
    (command,) = commands_of("batch.md")
    run(command, tmp_path)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    result = json.loads(line)
    assert (result["line"], result["id"]) == (1, 7)
    assert result["outputs"][0]["text"]


def test_the_page_on_chat(tmp_path):
    (command,) = commands_of("chat.md")
    assert run(command, tmp_path, "What is the capital of France?\n").strip()


def test_the_page_on_tracing(tmp_path):
    (command,) = commands_of("tracing.md")
    assert "Paris" in run(command, tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    }
    assert {"driver", "requests", "rank 0"} <= names


@pytest.mark.slow
def test_the_page_on_extensions(sample):
    """With the extension of that page installed."""
    house = sample("writing-an-extension.md")
    commands = commands_of("writing-an-extension.md")
    assert len(commands) >= 4
    for _program, *arguments in commands:
        assert house.run(*arguments).stdout.strip()
