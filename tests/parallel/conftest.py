"""A small random Llama whose heads, columns and layers divide unevenly, and what runs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def _small_engine():
    path = Path(__file__).with_name("small_engine.py")
    spec = importlib.util.spec_from_file_location("parallel_small_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def expected():
    """What one worker in this process answers. That it has lived here is no obstacle to others:
    what is forked is the nursery.
    """
    small_engine = _small_engine()
    with small_engine.start(executor="uni") as llm:
        return small_engine.answers(llm)
