"""What the architecture tests know of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def distributions(root) -> dict[str, Path]:
    """Import package name -> folder of its distribution."""
    folders = sorted(
        path.parent for path in root.glob("**/pyproject.toml") if ".venv" not in path.parts
    )
    return {
        package.parent.name: folder
        for folder in folders
        for package in (folder / "src").glob("*/__init__.py")
    }


@pytest.fixture(scope="session")
def sources(distributions) -> list[Path]:
    return sorted(
        path for folder in distributions.values() for path in (folder / "src").glob("**/*.py")
    )
