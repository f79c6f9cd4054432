"""The README's commands and samples run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
QUICK_START = (ROOT / "docs" / "quick-start.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()
PARALLEL = (ROOT / "docs" / "parallel.md").read_text()
GRAPHS = (ROOT / "docs" / "graphs.md").read_text()
SAMPLING = (ROOT / "docs" / "sampling.md").read_text()


def blocks(language: str, document: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


COMMANDS = [
    line
    for document in (README, QUICK_START)
    for block in blocks("console", document)
    for line in block.splitlines()
]


def run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_runs(command):
    program, *arguments = shlex.split(command, comments=True)
    assert program == "hardpoint"
    out = run([str(Path(sys.executable).parent / program), *arguments])
    assert out.strip()


def test_the_commands_are_there():
    assert len(COMMANDS) >= 4


def test_the_python_sample_runs():
    (sample,) = blocks("python")
    out = run([sys.executable, "-c", sample])
    assert "Paris" in out
    assert "generate" in out


def test_the_sample_of_the_quick_start_runs():
    assert "Paris" in run([sys.executable, "-c", *blocks("python", QUICK_START)])


def test_the_python_page_runs_from_top_to_bottom():
    samples = blocks("python", PYTHON)
    assert len(samples) >= 5
    out = run([sys.executable, "-c", "\n".join(samples)])
    assert "Paris" in out
    assert out.splitlines()[-1] == "[('generate', 'embed')]"


def test_the_page_on_sampling_runs():
    city, word, choice = run([sys.executable, "-c", "\n".join(blocks("python", SAMPLING))]).split(
        "\n"
    )[:3]
    assert set(json.loads(city)) == {"city", "rivers"}
    assert re.fullmatch("[A-Z][a-z]{2,9}", word)
    assert choice in ("Rome", "Oslo")


def test_the_page_on_several_workers_runs_as_a_script_without_a_guard(tmp_path):
    """From a file, which no worker may import again."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(blocks("python", PARALLEL)))
    lines = run([sys.executable, str(script)]).splitlines()
    assert "Paris" in lines[0]
    assert lines[1] == "[0, 1]"
    assert "model-rank-1-part-0.safetensors" in lines[2]
    assert lines[3:] == ["sharded_state 2"]


def test_the_page_on_graphs_runs():
    lines = run([sys.executable, "-c", "\n".join(blocks("python", GRAPHS))]).splitlines()
    assert "Paris" in lines[0]
    modes = {line.split()[0] for line in lines[2:-2]}
    assert modes == {"FULL", "PIECEWISE"}
    assert re.match(r"8 of 8 steps replayed a graph; \d+ of \d+ tokens were padding", lines[-2])


def test_every_page_is_reached_from_the_readme():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in README, page.name


PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
PAGES += [ROOT / line / "README.md" for line in ("core", "engine", "runtime", "conformance")]
PAGES += (ROOT / "plugins").glob("*/README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_to_be_installed_is_there(page):
    """Folders of the clone; nothing from PyPI that is not there yet."""
    for line in re.findall(r"^ +pip install (.*)", page.read_text(), re.MULTILINE):
        for word in shlex.split(line, comments=True):
            assert not word.startswith("hardpoint"), f"not released: {line}"
            if word.startswith("./") and not word.startswith("./hardpoint-"):
                assert (ROOT / word.partition("[")[0] / "pyproject.toml").is_file(), line


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere():
    for document in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
