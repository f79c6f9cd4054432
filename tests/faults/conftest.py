"""Faults on real processes. What the tests share lies in modules beside this file."""

from __future__ import annotations

import contextlib
import sys
import uuid
from pathlib import Path

import cloudpickle
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import fault_groups  # noqa: E402
from outside import SHARED, VARIABLE, Outside  # noqa: E402

# Workers need not have this folder on their path, nor import pytest.
cloudpickle.register_pickle_by_value(fault_groups)


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items if item.path.parent == HERE}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="session")
def outside():
    made = Outside()
    yield made
    made.close()


@pytest.fixture
def marked(monkeypatch, tmp_path, outside):
    """Mark all that this process starts; see at the end, from outside, that nothing of it is left:
    no process, no file, no shared memory with a name, no descriptor.
    """
    marker = uuid.uuid4().hex
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv(VARIABLE, marker)
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = fault_groups.own_descriptors()
    shared = outside.look(marker, SHARED)["files"]
    yield marker
    fault_groups.settle(lambda: not outside.look(marker)["processes"])
    # Files there may be others': those are in use by them, or were, or gone in a moment.
    with contextlib.suppress(TimeoutError):
        fault_groups.settle(lambda: not outside.look(marker, SHARED, known=shared)["files"])
    assert outside.look(marker, SHARED, known=shared)["files"] == []
    left = outside.look(marker, str(temporary))
    assert left == {"processes": {}, "listeners": [], "files": []}
    assert fault_groups.own_descriptors() == before


@pytest.fixture
def groups(marked, tmp_path):
    """Starts groups of workers; ends those that the test left."""
    made = fault_groups.Groups(tmp_path)
    yield made
    made.close()


@pytest.fixture
def drivers(marked, tmp_path, outside):
    """Starts drivers in processes of their own."""
    made = fault_groups.Drivers(marked, tmp_path, outside)
    yield made
    made.close()
