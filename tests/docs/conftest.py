"""The plugins that the pages show, installed as a person would who copies them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block whose first line is a comment with the file's name."""


class Sample:
    """A page's files, below a folder that a fresh process sees as installed."""

    def __init__(self, page: str, folder: Path) -> None:
        self.folder = folder
        text = (ROOT / "docs" / page).read_text()
        for name, content in FILE.findall(text):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}"]
        lines += [f"Version: {project['version']}"]
        lines += [f"Requires-Dist: {line}" for line in project["dependencies"]]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = project["entry-points"].items()
        (info / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
                for group, entries in groups
            )
        )

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS``, or ``hardpoint ARGUMENTS``."""
        if arguments[0] != "-c":
            main = "import sys; from hardpoint.cli import main; main(sys.argv[1:])"
            arguments = ("-c", main, *arguments)
        kept = {name: value for name, value in os.environ.items() if "HARDPOINT" not in name}
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=1200, check=False,
            env={**kept, "PYTHONPATH": str(self.folder)},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done


@pytest.fixture
def sample(tmp_path):
    """Return a function that installs the sample of a page."""
    return lambda page: Sample(page, tmp_path)
