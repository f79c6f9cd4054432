"""What is written reads like the work of a good engineer: the tools that judge it say so."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import hardpoint
import pytest
from hardpoint.capabilities import YES, Capability
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_scaffold import project
from hardpoint_scaffold.names import LONGEST, checked_names

KINDS = ("platform", "executor")
NAMES = ("a", "umbra", "zork-two_x", "m" * LONGEST)
"""Short and long, before and after ``hardpoint`` in the alphabet: lines break differently."""


def written(kind, name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = checked_names(kind, name)
    return folder / project.write(names, project.render(names))


def tool(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_ruff_finds_nothing(kind, name, folder, monkeypatch):
    made = written(kind, name, folder, monkeypatch)
    tool("ruff", "check", "--no-cache", ".", cwd=made)
    tool("ruff", "format", "--no-cache", "--check", ".", cwd=made)


LIGHT = {"platform": ("plugin", "platform", "settings"), "executor": ("plugin", "executor", "lane")}


def test_mypy_finds_nothing_in_what_the_driver_imports(folder, monkeypatch):
    """Both kinds at once, each under its name."""
    files = []
    for kind in KINDS:
        made = written(kind, f"zork-{kind}", folder, monkeypatch)
        files += [made / "src" / f"hardpoint_zork_{kind}" / f"{name}.py" for name in LIGHT[kind]]
    settings = folder / "hardpoint-zork-platform" / "pyproject.toml"
    tool("mypy", "--cache-dir=/dev/null", "--config-file", settings, *files, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mypy_finds_nothing(kind, folder, monkeypatch):
    made = written(kind, "zork", folder, monkeypatch)
    tool("mypy", "--cache-dir=/dev/null", cwd=made)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_templates_is_left(kind):
    files = project.render(checked_names(kind, "zork"))
    for name, text in files.items():
        left = text.replace("${{ matrix.python }}", "") if name.endswith(".yml") else text
        assert not re.search(r"\{\{|\{%|PACKAGE|jinja", name + left), name
        assert not text or text.endswith("\n"), name
        assert "\n\n\n\n" not in text, name
        assert not re.search("[ \t]$", text, re.MULTILINE), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_project_says_what_it_was_made_for(kind):
    files = project.render(checked_names(kind, "zork"))
    document = tomllib.loads(files["pyproject.toml"])
    own = document["project"]
    assert own["name"] == "hardpoint-zork"
    assert own["entry-points"] == {f"hardpoint.{kind}s": {"zork": "hardpoint_zork.plugin"}}
    major, minor = hardpoint.__version__.split(".")[:2]
    wanted = f">={major}.{minor},<{major}.{int(minor) + 1}"
    assert f"hardpoint{wanted}" in own["dependencies"]
    assert f"hardpoint-conformance{wanted}" in own["optional-dependencies"]["test"]
    assert f"api={hardpoint.API}" in files["src/hardpoint_zork/plugin.py"]


def test_the_platform_answers_for_each_capability():
    text = project.render(checked_names("platform", "zork"))["src/hardpoint_zork/platform.py"]
    answers = dict(re.findall(r"Capability\.(\w+): (\w+),", text))
    assert set(answers) == {each.name for each in Capability}
    offered = {name for name, answer in answers.items() if answer == "YES"}
    assert offered == project.OFFERED_BY_THE_TOOLKIT
    assert set(answers.values()) == {"YES", "NOT_YET"}


def test_what_the_toolkit_does_is_offered():
    """All that the host's platform has of it, but graphs and the invariance of its own programs."""
    host = {each.name for each, answer in CpuPlatform.capabilities.items() if answer is YES}
    assert host - project.OFFERED_BY_THE_TOOLKIT == {"GRAPHS", "BATCH_INVARIANCE"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_names_each_file_and_each_command_that_there_is(kind):
    files = project.render(checked_names(kind, "zork"))
    named = set(re.findall(r"^\| `(\S+)` \|", files["README.md"], re.MULTILINE))
    python = {name for name in files if name.endswith(".py") and "__init__" not in name}
    assert named == python
    commands = re.findall(r"^    hardpoint (\w+)", files["README.md"], re.MULTILINE)
    assert set(commands) == {"generate", "doctor", "conformance"}
