from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hardpoint.checkpoints.ggml_types import BLOCK_TYPES
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.gguf_metadata import Cursor, PackedArray
from hardpoint.errors import CheckpointError

F32 = struct.Struct("<f")


def opened(path: Path, raw: bytes) -> GGUFFile:
    path.write_bytes(raw)
    return GGUFFile(path)


@pytest.fixture
def written(tmp_path):
    """A file by the reference writer, with every kind of value."""
    path = tmp_path / "reference.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("k.u8", 200)
    writer.add_int8("k.i8", -5)
    writer.add_uint16("k.u16", 60000)
    writer.add_int16("k.i16", -300)
    writer.add_uint32("k.u32", 4_000_000_000)
    writer.add_int32("k.i32", -7)
    writer.add_uint64("k.u64", 1 << 60)
    writer.add_int64("k.i64", -(1 << 60))
    writer.add_float32("k.f32", 0.1)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.yes", True)
    writer.add_string("k.text", "schön")
    writer.add_array("k.texts", ["", "a", "世界", "x" * 300])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, 0.25])
    writer.add_array("k.flags", [True, False, True])
    writer.add_array("k.nested", [[1, 2], [3]])
    writer.add_array("k.deep", [["a", "b"], [""]])
    writer.add_tensor("b", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("a", np.arange(5, dtype=np.float16))
    packed = gguf.quants.quantize(
        np.random.default_rng(1).standard_normal((3, 64), dtype=np.float32),
        gguf.GGMLQuantizationType.Q4_1,
    )
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read_as_the_reference_reads_it(written):
    reference = gguf.GGUFReader(written)
    with GGUFFile(written) as file:
        keys = [key for key in reference.fields if not key.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            if key in ("k.nested", "k.deep"):
                continue  # the reference reader flattens them
            expected = reference.fields[key].contents()
            got = file.metadata[key]
            assert (list(got) if isinstance(got, tuple) else got) == expected, key
        assert file.metadata["k.nested"] == ((1, 2), (3,))
        assert file.metadata["k.deep"] == (("a", "b"), ("",))


def test_tensor_table_and_bytes_are_the_references(written):
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}
    with GGUFFile(written) as file:
        assert list(file.tensors) == list(reference)
        for name, entry in file.tensors.items():
            tensor = reference[name]
            assert entry.shape == tuple(int(size) for size in reversed(tensor.shape))
            assert entry.type == tensor.tensor_type.name
            assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
            assert bytes(file.data(name)) == tensor.data.tobytes()
            assert file.data(name).readonly
            copy = bytearray(entry.num_bytes)
            file.read_into(name, memoryview(copy))
            assert copy == bytes(file.data(name))


def test_type_table_is_the_reference_table():
    for kind, (elements, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.value in BLOCK_TYPES:
            block = BLOCK_TYPES[kind.value]
            assert (block.name, block.elements, block.num_bytes) == (kind.name, elements, num_bytes)
    assert {kind.value for kind in gguf.GGML_QUANT_SIZES} - set(BLOCK_TYPES) <= {40, 41}


def test_arrays_are_built_only_when_asked_for(written, monkeypatch):
    built: list[PackedArray] = []
    items = Cursor.items
    monkeypatch.setattr(
        Cursor, "items", lambda self, array: (built.append(array), items(self, array))[1]
    )
    with GGUFFile(written) as file:
        assert file.metadata["k.u8"] == 200
        assert file.metadata.count("k.texts") == 4
        assert built == []
        assert file.metadata["k.texts"] is file.metadata["k.texts"]
        assert len(built) == 1
        assert file.metadata.count("k.texts") == 4
        assert file.metadata.count("k.u8") is None


def test_views_outlive_the_file_and_a_closed_file_says_so(written):
    file = GGUFFile(written)
    view = file.data("a")
    file.close()
    file.close()
    assert np.frombuffer(view, np.float16).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="closed"):
        file.data("a")


def test_a_file_cut_short_while_open_is_reported_not_fatal(written):
    with GGUFFile(written) as file:
        entry = file.tensors["q"]
        with written.open("r+b") as other:
            other.truncate(entry.offset + 3)
        with pytest.raises(CheckpointError, match="'q' ends after 3 of"):
            file.read_into("q", memoryview(bytearray(entry.num_bytes)))


def test_every_truncation_is_refused(tmp_path, make):
    raw = make.llama_gguf()
    path = tmp_path / "cut.gguf"
    for length in [0, 1, 3, 4, 7, 8, 23, 24, *range(25, len(raw), 997), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_truncation_in_the_data_names_a_tensor(tmp_path, make):
    raw = make.llama_gguf()
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.ffn_down\.weight'.*truncated"):
        opened(tmp_path / "m.gguf", raw[:-100])


def one(data: bytes = F32.pack(1.0) * 8, shape=(8,), kind: int = 0):
    return {"t": (shape, kind, data)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (one(shape=(1 << 62, 1 << 62)), r"tensor 't' has shape .* truncated or corrupt"),
        (one(shape=(9,)), "tensor 't' needs bytes 64 to 100, but the file ends at 96"),
        (one(shape=(99,)), r"tensor 't' has shape \[99\] of F32, 396 bytes"),
        (one(shape=(0,)), "zero"),
        (one(shape=()), "0 dimensions"),
        (one(shape=(1, 1, 1, 1, 8)), "5 dimensions"),
        (one(kind=99), "type number 99 is unknown"),
        (one(kind=3), "rows of 8 are no multiple of Q4_1's 32"),
        (one(shape=(4,), data=F32.pack(0) * 40), r"follow tensor 't'"),
    ],
)
def test_impossible_tensors_are_refused_by_name(tmp_path, make, tensors, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path / "m.gguf", make.gguf([], tensors))
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def patched(raw: bytes, name: str, field: int, value: bytes) -> bytes:
    """Overwrite bytes at ``field`` after a tensor's name in the table."""
    begin = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + field
    return raw[:begin] + value + raw[begin + len(value) :]


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "'b' begins at byte .* inside tensor 'a'|'a' begins at byte .* inside tensor 'b'"),
        (33, "no multiple of the alignment 32"),
        (64, "gap"),
        (1 << 63, "truncated or corrupt"),
    ],
)
def test_overlaps_gaps_and_crooked_offsets_are_refused(tmp_path, make, offset, message):
    data = F32.pack(1.0) * 8
    raw = make.gguf([], {"a": ((8,), 0, data), "b": ((8,), 0, data)}) + bytes(
        64 if offset == 64 else 0
    )
    broken = patched(raw, "b", 4 + 8 + 4, struct.pack("<Q", offset))
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m.gguf", broken)
    if offset != 64:
        opened(tmp_path / "m.gguf", raw).close()


def header(version=3, tensors=0, keys=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


ROOM = bytes(1 << 12)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GGML" + ROOM, "not a GGUF file"),
        (header(1) + ROOM, "version 1"),
        (header(4) + ROOM, "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1 << 63) + ROOM, "tensors, where at most"),
        (header(keys=1 << 40) + ROOM, "metadata keys, where at most"),
        (header(keys=60_000) + ROOM, "bytes are needed"),
        (header(keys=1) + struct.pack("<Q", 1 << 50) + ROOM, "string of .* at most 1024"),
        (header(keys=1) + key(b"k", 77, b"") + ROOM, "key 'k' .* no value type 77"),
        (header(keys=1) + key(b"k", 7, b"\x02") + ROOM, "2 is not a boolean"),
        (header(keys=1) + key(b"\xff\xfe", 4, bytes(4)) + ROOM, "not UTF-8"),
        (header(keys=1) + key(b"k", 8, struct.pack("<Q", 1 << 62)) + ROOM, "key 'k'.*string of"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 5, 1 << 62)) + ROOM, "needed"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 8, 1 << 62)) + ROOM, "needed"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 9, 1 << 62)) + ROOM, "needed"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 55, 0)) + ROOM, "no value type 55"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQQ", 8, 1, 9)) + b"short", "17 bytes are"),
        (
            header(keys=1) + key(b"k", 9, struct.pack("<IQQ", 8, 3, 1 << 63)) + ROOM,
            "run over the end",
        ),
        (
            header(keys=1) + key(b"k", 9, struct.pack("<IQ", 9, 1) * 40) + ROOM,
            "nested deeper",
        ),
        (header(keys=2) + key(b"k", 4, bytes(4)) * 2 + ROOM, "'k'.*twice"),
        (header(keys=1) + key(b"general.alignment", 4, bytes(4)) + ROOM, "general.alignment is 0"),
        (
            header(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 24)) + ROOM,
            "general.alignment is 24",
        ),
        (header(keys=1) + key(b"general.alignment", 8, struct.pack("<Q", 0)) + ROOM, "alignment"),
    ],
)
def test_broken_headers_are_refused(tmp_path, raw, message):
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m.gguf", raw)


def test_a_tensor_named_twice_is_refused(tmp_path, make):
    raw = make.gguf([], {"aa": ((8,), 0, bytes(32)), "ab": ((8,), 0, bytes(32))})
    with pytest.raises(CheckpointError, match=r"'aa'.*twice"):
        opened(tmp_path / "m.gguf", raw.replace(make.text("ab"), make.text("aa")))


def test_a_string_array_that_is_not_utf8_fails_when_used_only(tmp_path):
    raw = header(keys=1) + key(b"k", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")
    message = r"m\.gguf: metadata key 'k'.*string 0.*UTF-8"
    with opened(tmp_path / "m.gguf", raw) as file, pytest.raises(CheckpointError, match=message):
        file.metadata["k"]


def test_other_alignments_are_honoured(tmp_path, make):
    data = F32.pack(2.0) * 3
    raw = make.gguf(
        [("general.alignment", 4, 64)], {"a": ((3,), 0, data), "b": ((3,), 0, data)}, alignment=64
    )
    with opened(tmp_path / "m.gguf", raw) as file:
        assert [entry.offset % 64 for entry in file.tensors.values()] == [0, 0]
        assert bytes(file.data("b")) == data
