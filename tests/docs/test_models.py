"""docs/models.md names what the tables of the code hold."""

from __future__ import annotations

from pathlib import Path

from hardpoint.checkpoints.float8 import FLOAT8
from hardpoint.checkpoints.gguf_architectures import ARCHITECTURES, NAMES
from hardpoint.checkpoints.unpacking import PLAIN_TYPES, UNPACKERS
from hardpoint_engine.text.splits import SPLITS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


def test_every_type_is_on_the_page():
    for kind in (*PLAIN_TYPES, *UNPACKERS, *FLOAT8):
        assert kind in PAGE, kind


def test_every_architecture_of_gguf_files_is_on_the_page():
    for name, architecture in ARCHITECTURES.items():
        assert name not in NAMES or f"`{name}`" in PAGE, name
        assert f"`{architecture.hf_class}`" in PAGE, name


def test_every_way_of_splitting_is_on_the_page():
    for name in SPLITS:
        assert f"`{name}`" in PAGE, name
