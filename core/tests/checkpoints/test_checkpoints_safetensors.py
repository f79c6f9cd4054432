from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hardpoint.checkpoints.safetensors import SafetensorsCheckpoint, SafetensorsFile
from hardpoint.errors import CheckpointError


def opened(path, raw: bytes) -> SafetensorsFile:
    path.write_bytes(raw)
    return SafetensorsFile(path)


def test_table_and_bytes_are_what_the_reference_writes(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "scalar": np.array(3, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "np"}
        assert set(file.tensors) == set(arrays)
        for name, array in arrays.items():
            assert file.tensors[name].shape == array.shape
            assert bytes(file.data(name)) == array.tobytes()
            assert file.data(name).readonly


def row(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t": row(dtype="F31")}, "element type 'F31' is unknown"),
        ({"t": row(dtype=["F32"])}, "element type"),
        ({"t": row(shape=(3,))}, r"shape \[3\] of F32 needs 12 bytes and data_offsets span 8"),
        ({"t": row(shape=(-2,))}, r"shape \[-2\] is impossible"),
        ({"t": row(shape=(True, 2))}, "impossible"),
        ({"t": row(shape=(2.0,))}, "impossible"),
        ({"t": row(shape=(1,) * 17)}, "impossible"),
        ({"t": row(shape=(1 << 49,))}, "impossible"),
        ({"t": row(shape=(1 << 40,) * 16)}, "needs"),
        ({"t": {**row(), "shape": "2"}}, "impossible"),
        ({"t": row(offsets=(8, 0))}, "data_offsets"),
        ({"t": row(offsets=(0, 4, 8))}, "data_offsets"),
        ({"t": row(dtype="F4", shape=(3,), offsets=(0, 1))}, r"needs 1\.5 bytes"),
        ({"t": {"dtype": "F32"}}, "not a table of dtype, shape and data_offsets"),
        ({"t": {**row(), "more": 1}}, "not a table of dtype, shape and data_offsets"),
        ({"t": 5}, "not a table"),
        ({"t": row(), "__metadata__": {"a": 1}}, "__metadata__"),
        ({"t": row(), "__metadata__": []}, "__metadata__"),
        ({"t": row(), "u": row(offsets=(4, 12))}, "'u' begins at byte .* inside tensor 't'"),
        ({"t": row(), "u": row()}, "inside tensor"),
        ({"t": row(shape=(1,), offsets=(0, 4)), "u": row("I8", (2,), (5, 7))}, "leaves a gap"),
        ({"t": row(), "u": row(offsets=(8, 16))}, "'u' needs bytes .* but the file ends"),
        ({"t": row(shape=(1,), offsets=(0, 4))}, "4 bytes follow tensor 't'"),
        ({}, "8 bytes follow the header"),
        ([], "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"t": NaN}', "NaN is not a number"),
        (b'{"t": 1, "t": 2}', "the key 't' appears twice"),
        (b'{"t": {"dtype": "F32", "dtype": "F32"}}', "'dtype' appears twice"),
        (b'{"t": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too deeply"),
        (b'{"t": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_headers_are_refused(tmp_path, make, header, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path / "m.safetensors", make.with_header(header, bytes(8)))
    assert "m.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [100, 65 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    with pytest.raises(CheckpointError, match=f"header claims {length} bytes"):
        opened(tmp_path / "m.safetensors", struct.pack("<Q", length) + b"{}" + bytes(40))


def test_a_header_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)  # sparse
    with pytest.raises(CheckpointError, match="at most"):
        SafetensorsFile(path)


def test_every_truncation_is_refused(tmp_path, make):
    raw = make.safetensors({"a": ("F32", (2,), bytes(8)), "b": ("BF16", (3, 2), bytes(12))})
    opened(tmp_path / "m.safetensors", raw).close()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            opened(tmp_path / "m.safetensors", raw[:length])


def test_one_file_or_shards_give_the_same_table(tmp_path, make):
    with (
        SafetensorsCheckpoint(make.folder(tmp_path / "one")) as one,
        SafetensorsCheckpoint(make.folder(tmp_path / "three", shards=3)) as three,
    ):
        assert len(three.files) == 3
        assert set(one.tensors) == set(three.tensors)
        for name, entry in one.tensors.items():
            other = three.tensors[name]
            assert (entry.shape, entry.type) == (other.shape, other.type)
            assert name in three.file_of(name).tensors


def test_a_single_file_of_another_name_is_found(tmp_path, make):
    folder = make.folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert [file.path.name for file in checkpoint.files] == ["weights.safetensors"]


def edited_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update({"no.such": FIRST}), f"tensor 'no.such' is not in '{FIRST}'"),
        (lambda m: m.update({NORM: FIRST}), f"'{NORM}' is said to be in '{FIRST}', but it is in"),
        (lambda m: m.pop(NORM), f"tensors not listed: {NORM}"),
        (lambda m: m.update({NORM: "../other.safetensors"}), "leads out of the folder"),
        (lambda m: m.update({NORM: "/etc/passwd.safetensors"}), "leads out of the folder"),
        (lambda m: m.update({NORM: "a/../../b.safetensors"}), "leads out of the folder"),
        (lambda m: m.update({NORM: "b\0.safetensors"}), "leads out of the folder"),
        (lambda m: m.update({NORM: "pytorch_model.bin"}), "no safetensors file"),
        (lambda m: m.update({NORM: 7}), "no safetensors file"),
        (lambda m: m.update({NORM: "gone.safetensors"}), r"gone\.safetensors: cannot be opened"),
        (lambda m: m.clear(), "weight_map is missing or empty"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, make, edit, message):
    folder = make.folder(tmp_path / "m", shards=2)
    edited_index(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(folder)


def test_one_tensor_in_two_shards_is_refused(tmp_path, make):
    folder = make.folder(tmp_path / "m", shards=2)
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())
    with pytest.raises(CheckpointError, match="is also in"):
        SafetensorsCheckpoint(folder)


def test_a_failed_open_leaves_no_descriptor(tmp_path, make):
    folder = make.folder(tmp_path / "m", shards=2)
    (folder / SECOND).write_bytes(b"short")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(CheckpointError):
            SafetensorsCheckpoint(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_pickled_weights_are_named_and_never_a_fallback(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin could run code .* convert"):
        SafetensorsCheckpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path, make):
    folder = make.folder(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files .* fetch the index"):
        SafetensorsCheckpoint(folder)
