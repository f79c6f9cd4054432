from __future__ import annotations

import os
import socket

import pytest
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.documents import read_object
from hardpoint.checkpoints.files import contained, open_regular, read_whole
from hardpoint.errors import CheckpointError


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a/../../x", "", "x\0y"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        contained(tmp_path, name)


def test_names_inside_are_kept(tmp_path):
    assert contained(tmp_path, "a/b.json") == tmp_path / "a" / "b.json"


def test_links_out_of_the_folder_are_refused(tmp_path):
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "secret")
    (folder / "sub").symlink_to(tmp_path)
    for name in ("config.json", "sub/secret"):
        with pytest.raises(CheckpointError, match="outside the folder"):
            contained(folder, name)
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_description(folder)


def test_links_within_the_folder_and_loops(tmp_path):
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to("real")
    assert read_object(contained(tmp_path, "link")) == {}
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError):
        open_regular(contained(tmp_path, "loop"))


def test_a_hugging_face_cache_is_a_model_folder(tmp_path, make):
    real = make.folder(tmp_path / "real")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(real.iterdir())):
        path.rename(repository / "blobs" / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
    assert read_description(snapshot).num_layers == 2
    (repository / "refs").write_text("{}")
    (snapshot / "other").symlink_to("../../refs")
    with pytest.raises(CheckpointError, match="outside the folder"):
        contained(snapshot, "other")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        for path in (tmp_path / "fifo", tmp_path / "s", tmp_path):
            with pytest.raises(CheckpointError, match="not a regular file"):
                open_regular(path)


def test_a_file_swapped_for_a_fifo_after_it_was_looked_at_does_not_block(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("{}")
    os.mkfifo(tmp_path / "fifo")
    regular = (tmp_path / "file").stat()
    flags: list[int] = []
    real = os.open

    def spied(path, flag):
        flags.append(flag)
        return real(path, flag | os.O_NONBLOCK)

    monkeypatch.setattr(type(tmp_path), "stat", lambda self: regular)
    monkeypatch.setattr(os, "open", spied)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_regular(tmp_path / "fifo")
    assert flags[0] & os.O_NONBLOCK


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_fifo_in_a_model_folder_does_not_block(tmp_path, make, name):
    folder = make.folder(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        read_description(folder)


def test_documents_are_bounded(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 32)  # sparse
    with pytest.raises(CheckpointError, match="4294967296 bytes, where at most 16777216 are read"):
        read_whole(path, 16 << 20)


def test_a_file_that_may_not_be_read_says_why(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        open_regular(tmp_path / "absent")
