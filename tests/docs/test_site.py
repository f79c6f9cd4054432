"""The site is built without a warning, and holds what the code holds."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from pathlib import Path

import click
import hardpoint_conformance
import pytest
from hardpoint.capabilities import SINCE, Capability
from hardpoint.cli_group import commands
from hardpoint.config.keys import KEYS
from hardpoint.rpc.lifecycle import STEPS
from hardpoint_conformance import tampering

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_site"))
import diary  # noqa: E402
import errors  # noqa: E402
import lifecycle  # noqa: E402
import suites  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a function: name of a page -> its text, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", DOCS, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr

    def text(page: str) -> str:
        body = (folder / f"{page}.html").read_text().partition('role="main"')[2]
        return html.unescape(re.sub(r"<[^>]+>", "", body))

    text.folder = folder
    return text


def test_the_configuration_page_has_every_key_with_its_bounds(site):
    page = site("configuration")
    for key in KEYS:
        assert key.variable in page, key.path
        assert key.help in page, key.path
        assert all(choice in page for choice in key.choices), key.path
    assert "at least 1" in page


def test_every_hook_has_a_section_with_its_signature(site):
    page = site("hooks")
    for name in diary.HOOKS:
        assert re.search(rf"hookspecs\.{name}\([^)]*\)\s*→", page), name


def test_every_capability_has_its_number(site):
    page = " ".join(site("capabilities").split())
    for each in Capability:
        assert f"{each.name} {each.value} {SINCE[each][0]}.{SINCE[each][1]}" in page, each


def test_every_command_has_a_section(site):
    page = site("command-line")
    context = click.Context(commands)
    for name in (*commands.list_commands(context), "bench rpc"):
        assert f"hardpoint {name}" in page, name


def test_every_error_says_what_to_do(site):
    page = " ".join(site("errors").split())
    for each in errors.errors():
        assert each.name in page
        assert errors.WAY_OUT in " ".join(each.text.split()), f"{each.module}.{each.name}"


def test_every_test_of_the_kit_is_on_the_page_on_certifying(site):
    page = site("certifying")
    for name in suites.SUITES:
        suite = getattr(hardpoint_conformance, name)
        assert tampering.tests_of(suite) == set(suites.tests_of(suite))
        for test in tampering.tests_of(suite):
            assert test.removeprefix("test_").replace("_", " ") in page, f"{name}.{test}"


def test_every_mutant_has_its_row():
    rows = suites.mutants().splitlines()[2:]
    assert len(rows) >= 60
    assert all(cell.strip() for row in rows for cell in row.strip("|").split(" | "))


def test_the_page_on_certifying_shows_what_the_examples_run():
    text = (DOCS / "certifying.md").read_text()
    shown = re.findall(
        r"^```python\n# tests/test_conformance.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    for source, example in zip(shown, ("hardpoint-acme", "hardpoint-threads"), strict=True):
        path = ROOT / "examples" / "out_of_tree" / example / "tests" / "test_conformance.py"
        _docstring, *statements = ast.parse(path.read_text()).body
        assert list(map(ast.unparse, ast.parse(source).body)) == list(map(ast.unparse, statements))


def test_nothing_on_the_site_is_fetched_from_elsewhere(site):
    for path in site.folder.glob("*.html"):
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', path.read_text()), (
            path.name
        )


def test_the_lifecycle_is_the_order_that_the_host_enforces():
    events = lifecycle.diary()
    methods = [name for process, kind, name in events if kind == "worker"]
    assert [name for name in methods if name in STEPS.values()] == list(STEPS.values())
    assert methods[-1] == "shutdown"
    assert all(process == "worker" for process, kind, _ in events if kind == "worker")
    assert all(
        process == "driver" for process, kind, _ in events if kind in ("platform", "executor")
    )


def test_the_announcements_surround_what_they_announce():
    names = [name for process, _, name in lifecycle.diary() if process == "worker"]
    for earlier, later in (
        ("init_device", "hardpoint_worker_started"),
        ("hardpoint_worker_started", "load_model"),
        ("load_model", "hardpoint_model_loaded"),
        ("hardpoint_step_started", "execute_model"),
        ("execute_model", "hardpoint_step_finished"),
        ("hardpoint_worker_closing", "shutdown"),
    ):
        assert names.index(earlier) < names.index(later), (earlier, later)


def test_the_picture_shows_every_call_once_in_its_phase():
    picture = lifecycle.picture()
    for _, kind, name in lifecycle.diary():
        assert f"{name}()" in picture, (kind, name)
