"""The commands of the pages run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hardpoint.cli_group import commands

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = DOCS.parent / "README.md"
LINE = r"^(?:    |\$ )?(?:\S+ -m |torchrun .* --no-python +)?(hardpoint \S.*)$"
"""A command, alone or behind what starts it."""


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


def every_command() -> list[tuple[str, list[str]]]:
    """Return (page, words) of each command that a page or a README shows, whatever runs it."""
    pages = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.parent.glob("*/**/README.md")), README]
    found = []
    for page in pages:
        if ".venv" in page.parts:
            continue
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(LINE, text, re.MULTILINE):
            words = shlex.split(line.partition(" && ")[0], comments=True)
            found.append((page.name, words[1:]))
    return found


def test_every_command_of_every_page_is_one_that_there_is():
    """Those that need other hosts or devices, too: the command, and each of its flags."""
    shown = every_command()
    assert {"several-hosts.md", "ray.md", "external-launchers.md"} <= {page for page, _ in shown}
    for page, words in shown:
        context = click.Context(commands, info_name="hardpoint")
        command: click.Command = commands
        rest = words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            name, found, rest = command.resolve_command(context, rest)
            assert found is not None, f"{page}: hardpoint {shlex.join(words)}"
            context, command = click.Context(found, parent=context, info_name=name), found
        try:
            command.make_parser(context).parse_args(args=list(rest))
        except click.UsageError as error:
            pytest.fail(f"{page}: hardpoint {shlex.join(words)}: {error.format_message()}")


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
