"""A sharded state on the disk: whole or not at all, and believed in nothing."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import struct
from hashlib import sha256

import pytest
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.safetensors import SafetensorsFile
from hardpoint.checkpoints.safetensors_writer import FileTable, SafetensorsWriter
from hardpoint.checkpoints.saving import Saving
from hardpoint.checkpoints.sharded_state import (
    COMMITTED,
    MANIFEST,
    Manifest,
    check_files,
    configuration_of,
    has_manifest,
    located,
    read_manifest,
)
from hardpoint.config.schema import ParallelConfig
from hardpoint.errors import CheckpointError
from hardpoint.records import SavedFile, SavedTensor
from hardpoint.rpc.faults import fault, fired

TENSORS = (
    SavedTensor(name="a.weight", dtype="float32", shape=(3, 2)),
    SavedTensor(name='odd "name" é', dtype="bfloat16", shape=(5,)),
    SavedTensor(name="none", dtype="float16", shape=(0, 7)),
    SavedTensor(name="scalar", dtype="float64", shape=()),
)


def data_of(tensor):
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[tensor.dtype]
    return bytes(range(256))[: size * math.prod(tensor.shape)]


def write(path, tensors=TENSORS, **metadata):
    table = FileTable(metadata=metadata)
    for tensor in tensors:
        table.add(tensor)
    with SafetensorsWriter(path, table) as file:
        for tensor in tensors:
            file.write(memoryview(data_of(tensor)))
    return file.saved


class TestWriter:
    def test_what_is_written_is_read_by_the_reader_and_by_the_formats_own_library(self, tmp_path):
        saved = write(tmp_path / "x.safetensors", kind="test")
        raw = (tmp_path / "x.safetensors").read_bytes()
        assert saved == SavedFile(
            name="x.safetensors",
            sha256=sha256(raw).hexdigest(),
            num_bytes=len(raw),
            tensors=TENSORS,
        )
        with SafetensorsFile(tmp_path / "x.safetensors") as file:
            assert list(file.tensors) == [tensor.name for tensor in TENSORS]
            for tensor in TENSORS:
                assert file.tensors[tensor.name].shape == tensor.shape
                assert bytes(file.data(tensor.name)) == data_of(tensor)
            assert file.metadata == {"kind": "test"}
        safetensors = pytest.importorskip("safetensors")
        with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as file:
            assert file.get_tensor("a.weight").tobytes() == data_of(TENSORS[0])

    def test_a_table_knows_the_size_of_its_file_before_it_is_written(self, tmp_path):
        table = FileTable()
        for index, tensor in enumerate(TENSORS):
            expected = table.size_with(tensor)
            table.add(tensor)
            saved = write(tmp_path / str(index), TENSORS[: index + 1])
            assert saved.num_bytes == expected
            raw = (tmp_path / str(index)).read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            assert (8 + length) % 8 == 0

    def test_missing_bytes_and_files_that_exist_are_refused(self, tmp_path):
        table = FileTable()
        table.add(TENSORS[0])
        writer = SafetensorsWriter(tmp_path / "x", table)
        writer.write(memoryview(b"12345"))
        with pytest.raises(ValueError, match="19 bytes of its tensors were not given"):
            writer.close()
        with pytest.raises(FileExistsError):
            SafetensorsWriter(tmp_path / "x", table)


def manifest(*ranks, **changes):
    values = {
        "tensor_parallel_size": len(ranks),
        "pipeline_parallel_size": 1,
        "dtype": "float32",
        "config": {"architectures": ["X"]},
        "files": tuple(map(tuple, ranks)),
        "api": (2, 0),
        "version": "0.1.0",
        "plugins": ("platform x: acme 1.2, API 2.0",),
    }
    return Manifest(**(values | changes))


def save(folder, *names, **changes):
    """Save one rank's files, each of one tensor."""
    with Saving(folder) as saving:
        files = [write(saving.place / name, [TENSORS[i]]) for i, name in enumerate(names)]
        saving.commit(manifest(files, **changes))
    return files


def killed_in_a_save(plan, folder, *names):
    """Save in a child process that has a plan of faults; return the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        try:
            fault.plan(plan)
            save(folder, *names)
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


class TestSaving:
    def test_the_manifest_says_what_is_there(self, tmp_path):
        files = save(tmp_path, "p0", "p1")
        assert read_manifest(tmp_path) == manifest(files)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p0", "p1", MANIFEST]
        for file in files:
            assert sha256((tmp_path / file.name).read_bytes()).hexdigest() == file.sha256

    def test_the_next_one_replaces_it_and_leaves_other_files_alone(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        save(tmp_path, "p0", "p1", "p2")
        files = save(tmp_path, "p0", "q1")
        assert read_manifest(tmp_path).files == (tuple(files),)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["config.json", "p0", "q1", MANIFEST]

    def test_one_that_fails_leaves_the_old_state(self, tmp_path):
        files = save(tmp_path, "p0", "p1")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(ZeroDivisionError), Saving(tmp_path) as saving:
            1 / len(write(saving.place / "p0", TENSORS[:1]).tensors[1:])
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        assert read_manifest(tmp_path).files == (tuple(files),)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"name": "absent"}, "that is not so"),
            ({"num_bytes": 7}, "wrote 7 bytes"),
            ({"name": "../p0"}, "that is not so"),
        ],
    )
    def test_a_rank_that_says_what_is_not_so_is_not_believed(self, tmp_path, change, message):
        with Saving(tmp_path) as saving:
            written = write(saving.place / "p0")
            (tmp_path / "p0").write_bytes(mine := bytes(written.num_bytes))
            file = evolve(written, **change)
            with pytest.raises(CheckpointError, match=message):
                saving.commit(manifest([file]))
        assert [path.name for path in tmp_path.iterdir()] == ["p0"]
        assert (tmp_path / "p0").read_bytes() == mine

    def test_two_ranks_with_one_name_are_refused(self, tmp_path):
        with Saving(tmp_path) as saving:
            file = write(saving.place / "p0")
            with pytest.raises(CheckpointError, match="files of one name"):
                saving.commit(manifest([file], [file]))

    @pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
    def test_killed_anywhere_in_the_commit_the_state_is_the_old_one_or_the_new_one(self, tmp_path):
        seen = set()
        for nth in itertools.count(1):
            folder, log = tmp_path / f"state-{nth}", tmp_path / f"log-{nth}"
            folder.mkdir()
            log.mkdir()
            (folder / "mine").write_text("not of any state")
            old = tuple(save(folder, "p0", "p1", "gone"))
            killed = killed_in_a_save(f"{log}:save.commit:{nth}=kill", folder, "p1", "p0", "q0")
            assert bool(killed) == bool(fired(log, "save.commit"))
            files = read_manifest(folder).files[0]
            assert has_manifest(folder)
            check_files(folder, files)
            for file in files:
                assert sha256(located(folder, file.name).read_bytes()).hexdigest() == file.sha256
            names = [file.name for file in files]
            assert names in (["p0", "p1", "gone"], ["p1", "p0", "q0"])
            assert (files == old) == (names[0] == "p0")
            seen.add(names[0])
            save(folder, "p1", "z0")
            assert sorted(path.name for path in folder.iterdir()) == ["mine", "p1", MANIFEST, "z0"]
            assert [file.name for file in read_manifest(folder).files[0]] == ["p1", "z0"]
            if not killed:
                break
        assert nth > 6
        assert seen == {"p0", "p1"}

    def test_a_save_whose_place_is_taken_says_so(self, tmp_path):
        """Another one has been decided and is being put in its place by a process that lives."""
        with Saving(tmp_path) as saving:
            file = write(saving.place / "p0")
            (tmp_path / COMMITTED).mkdir()
            (tmp_path / COMMITTED / "p0").touch()
            with pytest.raises(CheckpointError, match="another save is being put in its place"):
                saving.commit(manifest([file]))

    def test_what_cannot_be_gone_on_with_is_told_and_removed(self, tmp_path, caplog):
        (tmp_path / COMMITTED).mkdir()
        (tmp_path / COMMITTED / MANIFEST).write_text("{")
        save(tmp_path, "p0")
        assert "cut off is not gone on with" in caplog.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p0", MANIFEST]

    def test_what_a_killed_save_left_is_removed_and_what_a_running_one_has_is_not(self, tmp_path):
        killed, running = tmp_path / ".saving-killed", tmp_path / ".saving-running"
        for folder in (killed, running):
            folder.mkdir()
            (folder / "part").write_text("half")
        handle = os.open(running, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            save(tmp_path, "p0")
            assert not killed.exists()
            assert (running / "part").exists()
        finally:
            os.close(handle)

    def test_a_state_whose_manifest_is_broken_can_be_replaced(self, tmp_path, caplog):
        (tmp_path / MANIFEST).write_text("{")
        save(tmp_path, "p0")
        assert "the parts of the old state are left" in caplog.text
        assert read_manifest(tmp_path)

    def test_a_folder_that_only_the_ranks_have_gets_no_manifest(self, tmp_path):
        with Saving(tmp_path / "elsewhere") as saving:
            assert saving.place == tmp_path / "elsewhere"
            with pytest.raises(CheckpointError, match="this host has no such folder"):
                saving.commit(manifest([]))


WRONG = [
    ("format", 2, "format is 2"),
    ("format", None, "format"),
    ("api", [2], "api"),
    ("api", ["2", 0], "api"),
    ("dtype", "int4", "dtype"),
    ("dtype", 4, "dtype"),
    ("tensor_parallel_size", 0, "tensor_parallel_size"),
    ("pipeline_parallel_size", 1 << 40, "pipeline_parallel_size"),
    ("config", [1], "config"),
    ("plugins", "x", "plugins"),
    ("plugins", [1], "plugins"),
    ("ranks", [], "ranks"),
    ("ranks", {}, "ranks"),
    ("ranks", [1], "ranks"),
    ("ranks", [[1]], "ranks"),
    ("name", "../x", "without folders"),
    ("name", "..", "without folders"),
    ("name", "", "without folders"),
    ("name", "a\0b", "without folders"),
    ("sha256", "0", "hexadecimal"),
    ("sha256", "G" * 64, "hexadecimal"),
    ("num_bytes", -1, "num_bytes"),
    ("num_bytes", 1 << 70, "num_bytes"),
    ("num_bytes", True, "num_bytes"),
    ("tensors", [], "tensors"),
    ("tensors", {"x": ["int4", [1]]}, "tensors"),
    ("tensors", {"x": ["float32", [-1]]}, "tensors"),
    ("tensors", {"x": ["float32", [1.0]]}, "tensors"),
    ("tensors", {"x": ["float32"]}, "tensors"),
    ("tensors", {"x": ["float32", [1 << 50]]}, "tensors"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=str)
def test_a_manifest_that_cannot_be_is_refused(tmp_path, key, value, message):
    save(tmp_path, "p0")
    path = tmp_path / MANIFEST
    document = json.loads(path.read_text())
    place = document if key in document else document["ranks"][0][0]
    place[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


def test_a_file_or_a_tensor_of_one_rank_named_twice_is_refused(tmp_path):
    save(tmp_path, "p0")
    path = tmp_path / MANIFEST
    document = json.loads(path.read_text())
    document["ranks"].append(document["ranks"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="the folder has p0 twice"):
        read_manifest(tmp_path)
    document["ranks"] = [[document["ranks"][0][0], {**document["ranks"][0][0], "name": "p1"}]]
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"rank 0 has .*a\.weight.* twice"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "inside").mkdir()
    save(tmp_path / "inside", "p0")
    outside = tmp_path / "outside"
    (tmp_path / "inside" / MANIFEST).rename(outside)
    (tmp_path / "inside" / MANIFEST).symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_manifest(tmp_path / "inside")


@pytest.mark.parametrize(
    ("sizes", "different"),
    [
        ((2, 3), None),
        ((1, 3), ("tensor_parallel_size", 2)),
        ((2, 1), ("pipeline_parallel_size", 3)),
        ((3, 2), ("tensor_parallel_size", 2)),
    ],
)
def test_other_numbers_of_ranks_are_told_apart(sizes, different):
    saved = manifest([], tensor_parallel_size=2, pipeline_parallel_size=3)
    tensor, stages = sizes
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    assert saved.differs(parallel, tensor * stages) == different


def test_one_worker_loads_what_one_saved_with_any_number_of_devices():
    parallel = ParallelConfig(tensor_parallel_size=3)
    saved = manifest([], tensor_parallel_size=2)
    assert saved.differs(parallel, 1) is None
    assert saved.differs(parallel, 3) == ("tensor_parallel_size", 2)


class TestDescription:
    @pytest.fixture
    def original(self, make, tmp_path):
        return read_description(make.folder(tmp_path / "original", kind="F32"))

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "saved").mkdir()
        return tmp_path / "saved"

    @pytest.fixture
    def shapes(self, original):
        return expected_shapes(original)

    def saved(self, folder, original, shapes, halves=2, drop=(), **changes):
        """Save every tensor, each in as many parts as there are ranks."""
        ranks = []
        with Saving(folder) as saving:
            for rank in range(halves):
                table = FileTable()
                for name, shape in shapes.items():
                    part = (shape[0] // halves, *shape[1:])
                    if name not in drop:
                        table.add(SavedTensor(name=name, dtype="float32", shape=part))
                with SafetensorsWriter(saving.place / f"r{rank}", table) as file:
                    file.write(memoryview(bytes(table.num_bytes)))
                ranks.append([file.saved])
            saving.commit(manifest(*ranks, config=configuration_of(original), **changes))

    def test_it_is_the_originals(self, folder, original, shapes):
        self.saved(folder, original, shapes)
        for load_format in ("auto", "sharded_state"):
            found = read_description(folder, load_format)
            here = {"path": folder, "format": "sharded_state", "hf_config": found.hf_config}
            assert found == evolve(original, **here)
            assert configuration_of(found) == configuration_of(original)

    def test_the_original_beside_it_is_what_auto_means(self, original, shapes):
        self.saved(original.path, original, shapes)
        assert read_description(original.path).format == "safetensors"
        assert read_description(original.path, "sharded_state").format == "sharded_state"

    def test_a_missing_part_is_named_with_what_it_held(self, folder, original, shapes):
        self.saved(folder, original, shapes)
        (folder / "r1").unlink()
        with pytest.raises(CheckpointError, match=r"r1: a part .* is missing .*embed_tokens"):
            read_description(folder)

    def test_a_part_of_another_size_is_refused(self, folder, original, shapes):
        self.saved(folder, original, shapes)
        with (folder / "r1").open("ab") as file:
            file.write(b"x")
        with pytest.raises(CheckpointError, match=r"r1: the part has \d+ bytes where"):
            read_description(folder)

    def test_a_configuration_that_the_parts_belie_is_refused(self, folder, original, shapes):
        self.saved(folder, original, shapes, drop=["model.norm.weight"])
        with pytest.raises(CheckpointError, match=r"1 tensors are less than .*model\.norm"):
            read_description(folder)
        larger = evolve(original, vocab_size=original.vocab_size * 1000)
        self.saved(folder, larger, shapes)
        with pytest.raises(CheckpointError, match=r"less than the whole: .*embed_tokens"):
            read_description(folder)
        foreign = evolve(larger, architecture="OtherForCausalLM")
        self.saved(folder, foreign, shapes)
        with pytest.raises(CheckpointError, match="fewer than the embedding"):
            read_description(folder)

    def test_without_a_state_it_says_so(self, folder):
        with pytest.raises(CheckpointError, match=f"there is no {MANIFEST} in the folder"):
            read_description(folder, "sharded_state")
