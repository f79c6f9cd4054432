"""What the files of a model are, told briefly."""

from __future__ import annotations

import os

import pytest
from hardpoint.checkpoints.fingerprint import BLOCK, SMALL, difference, fingerprint
from hardpoint.errors import CheckpointError


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(SMALL + 5 * BLOCK))
    (tmp_path / "notes.md").write_text("of no consequence")
    return tmp_path


def test_equal_files_tell_the_same_wherever_they_are(model, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((model / name).read_bytes())
    told = fingerprint(model, "safetensors")
    assert sorted(told) == ["config.json", "model.safetensors"]
    assert told == fingerprint(copy, "safetensors")
    assert difference(told, fingerprint(copy, "safetensors")) is None


def _other(model, name, at):
    data = bytearray((model / name).read_bytes())
    data[at] ^= 1
    (model / name).write_bytes(data)


@pytest.mark.parametrize("at", [0, BLOCK - 1, -1, -BLOCK], ids=str)
def test_another_first_or_last_block_is_another_file(model, at):
    before = fingerprint(model, "safetensors")
    _other(model, "model.safetensors", at)
    name, here, there = difference(before, fingerprint(model, "safetensors"))
    assert name == "model.safetensors"
    assert here.startswith(f"{SMALL + 5 * BLOCK} bytes, ")
    assert there != here


def test_each_byte_of_a_small_file_counts(model):
    (model / "tokenizer.json").write_bytes(bytes(SMALL))
    before = fingerprint(model, "safetensors")
    _other(model, "tokenizer.json", SMALL // 2 + 77)
    assert difference(before, fingerprint(model, "safetensors"))[0] == "tokenizer.json"


def test_other_weights_of_the_same_size_are_seen_between_the_ends(model):
    before = fingerprint(model, "safetensors")
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:BLOCK] + os.urandom(len(data) - 2 * BLOCK) + data[-BLOCK:])
    assert difference(before, fingerprint(model, "safetensors"))[0] == "model.safetensors"


def test_a_file_that_is_not_there_is_told_as_missing(model):
    before = fingerprint(model, "safetensors")
    (model / "config.json").unlink()
    name, _, there = difference(before, fingerprint(model, "safetensors"))
    assert (name, there) == ("config.json", "missing")


def test_a_model_of_one_file_is_that_file_and_made_up_weights_are_none(model):
    assert list(fingerprint(model / "model.safetensors", "gguf")) == ["model.safetensors"]
    assert fingerprint(model, "dummy") == {}
    os.mkfifo(model / "pipe.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        fingerprint(model, "safetensors")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        fingerprint(model / "none", "gguf")
