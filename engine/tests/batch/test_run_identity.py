"""Two runs are the same if they compute the same, wherever their model lies."""

from __future__ import annotations

import shutil

import pytest
from hardpoint.config.loading import load_config
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.batch.run_identity import run_identity

SAMPLING = SamplingParams(temperature=0, max_tokens=3)
TALK = {"system": None, "chat_template": None}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(1 << 20))
    return made


def identity(model, sampling=SAMPLING, conversation=TALK, **keys) -> list[str]:
    config = load_config(overrides={"model": str(model), **keys}, environ={})
    return run_identity(config, sampling, conversation).split("-")


def changed(one, other) -> list[int]:
    return [part for part in range(3) if one[part] != other[part]]


def test_each_part_has_its_own_digest(folder):
    first = identity(folder)
    assert changed(first, identity(folder)) == []
    assert changed(first, identity(folder, max_num_seqs=3, platform="dummy")) == []
    assert changed(first, identity(folder, dtype="bfloat16")) == [0]
    assert changed(first, identity(folder, SamplingParams(temperature=0, max_tokens=4))) == [1]
    assert changed(first, identity(folder, seed=3)) == [1]
    assert changed(first, identity(folder, conversation={**TALK, "system": "S"})) == [2]
    assert changed(first, identity(folder, conversation=None)) == [2]


def test_a_model_may_be_moved_and_not_exchanged(folder, tmp_path):
    first = identity(folder)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / "README.md").write_text("more words")
    assert changed(first, identity(moved)) == []
    for offset in (0, 1 << 19, (1 << 20) - 1):
        with (moved / "model.safetensors").open("r+b") as file:
            file.seek(offset)
            file.write(b"\1")
        assert changed(first, identity(moved)) == [0]
        shutil.copy(folder / "model.safetensors", moved)
    (moved / "tokenizer.json").write_text("{}")
    assert changed(first, identity(moved)) == [0]
    assert changed(first, identity(tmp_path / "none")) == [0]
