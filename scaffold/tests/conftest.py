"""The command line, as a person calls it, in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty folder to work in."""
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def shell(folder) -> Shell:
    """Return a function that runs ``hardpoint ARGUMENTS`` in ``folder``, after ``before``."""

    def run(*arguments: str, before: str = "", cwd: Path = folder):
        code = f"import sys\n{before}\nfrom hardpoint.cli import main\nmain(sys.argv[1:])"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    return run
