"""Each rank's tensors to disk and back, without a process or a peer: seats are plain values."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.saving import Saving
from hardpoint.checkpoints.sharded_state import (
    MANIFEST,
    Manifest,
    configuration_of,
    read_manifest,
)
from hardpoint.config.loading import load_config
from hardpoint.errors import CancelledStepError, CheckpointError, UnsupportedError
from hardpoint.records import WorkerContext
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.loading import load_into, open_weights
from hardpoint_runtime.loading.sharded_state import (
    described,
    held_tensors,
    in_parts,
    load_sharded_state,
    save_sharded_state,
)
from hardpoint_runtime.models import build_model
from hardpoint_runtime.models.layers import Slot
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.groups import Topology
from hardpoint_runtime.parallel.seat import Seat
from safetensors.torch import load_file

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]


def context_of(rank, tensor, stages, **more):
    keys = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "dtype": "float32"}
    config = load_config(overrides=keys, environ={})
    return WorkerContext(
        config=config, rank=rank, local_rank=rank, world_size=tensor * stages, **more
    )


def part_of(description, rank, tensor, stages, dtype=torch.float32):
    """One rank's model, its weights full of NaN."""
    seat = Seat(topology=Topology(tensor=tensor, pipeline=stages), rank=rank)
    model = build_model(description, Operations(), HostDeviceOps(), dtype, seat=seat)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    return model


def loaded(description, rank, tensor, stages, dtype=torch.float32):
    model = part_of(description, rank, tensor, stages, dtype)
    with open_weights(description) as weights:
        load_into(model, weights, dtype)
    return model


def save(folder, description, tensor, stages, *, pattern=None, max_size=None, dtype="float32"):
    """Save as the driver and its workers do."""
    kind = getattr(torch, dtype)
    with Saving(folder) as saving:
        files = [
            save_sharded_state(
                loaded(description, rank, tensor, stages, kind),
                context_of(rank, tensor, stages),
                saving.place,
                pattern,
                max_size,
            )
            for rank in range(tensor * stages)
        ]
        saving.commit(
            Manifest(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                dtype=dtype,
                config=configuration_of(description),
                files=tuple(map(tuple, files)),
                api=(2, 0),
                version="0",
            )
        )
    return files


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def original(disk, tmp_path, request):
    disk.folder(tmp_path / "original", torch.float32, tie_word_embeddings=request.param)
    if request.param:
        disk_drop(tmp_path / "original", "lm_head.weight")
    return read_description(tmp_path / "original")


def disk_drop(folder, name):
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "saved").mkdir()
    return tmp_path / "saved"


@pytest.mark.parametrize(("tensor", "stages"), TOPOLOGIES)
def test_what_a_rank_saves_it_loads_bit_for_bit(original, folder, tensor, stages):
    save(folder, original, tensor, stages, max_size=20_000)
    saved = read_description(folder, "sharded_state")
    for rank in range(tensor * stages):
        model = part_of(saved, rank, tensor, stages)
        assert load_sharded_state(model, folder, context_of(rank, tensor, stages)) > 0
        expected = loaded(original, rank, tensor, stages)
        for (name, mine), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("tensor", "stages"), TOPOLOGIES)
def test_the_parts_together_are_the_whole(original, folder, tensor, stages):
    """Read by the format's own library, put together by where each rank's part belongs."""
    files = save(folder, original, tensor, stages)
    whole = load_file(original.path / "model.safetensors")
    seen = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in whole.items()}
    for rank, mine in enumerate(files):
        slots = part_of(original, rank, tensor, stages).weight_slots()
        for file in mine:
            for name, part in load_file(folder / file.name).items():
                assert torch.equal(whole[name][slots[name].held or ...], part)
                seen[name][slots[name].held or ...] = True
    assert all(each.all() for each in seen.values())


@pytest.mark.parametrize(
    ("tensor", "stages", "pattern", "expected"),
    [
        (1, 1, None, {"model-rank-0-part-0.safetensors"}),
        (2, 1, None, {f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)}),
        (1, 2, None, {f"model-pp-{pp}-tp-0-part-0.safetensors" for pp in (0, 1)}),
        (2, 2, None, {f"model-pp-{r // 2}-tp-{r % 2}-part-0.safetensors" for r in range(4)}),
        (2, 2, "x{rank:02d}.{part}", {f"x0{rank}.0" for rank in range(4)}),
        (2, 2, "{pp}{tp}{part}", {"000", "010", "100", "110"}),
    ],
)
def test_the_names_of_the_files(disk, tmp_path, folder, tensor, stages, pattern, expected):
    disk.folder(tmp_path / "original", torch.float32)
    save(folder, read_description(tmp_path / "original"), tensor, stages, pattern=pattern)
    assert {path.name for path in folder.iterdir()} == expected | {MANIFEST}


def test_no_file_is_larger_than_asked_and_none_is_empty(original, folder, caplog):
    limit = 30_000
    (files,) = save(folder, original, 1, 1, max_size=limit)
    assert len(files) > 3
    for file in files:
        assert file.tensors
        alone = len(file.tensors) == 1
        assert file.num_bytes <= limit or alone
        assert file.num_bytes == (folder / file.name).stat().st_size
    assert any(file.num_bytes > limit for file in files), "the embedding is larger by itself"
    assert "more than max_size = 30000" in caplog.text
    sizes = [file.num_bytes for file in files]
    tensors = [tensor for file in files for tensor in file.tensors]
    tables = in_parts(tensors, limit)
    assert [table.tensors for table in tables] == [list(file.tensors) for file in files]
    for size, file in zip(sizes, files[1:], strict=False):
        first = file.tensors[0]
        table = tables[files.index(file) - 1]
        assert table.size_with(first) > limit, f"{first.name} would have fitted in {size} bytes"


def test_a_limit_below_every_tensor_gives_each_a_file_of_its_own(original, folder):
    (files,) = save(folder, original, 1, 1, max_size=1)
    assert [len(file.tensors) for file in files] == [1] * len(
        held_tensors(loaded(original, 0, 1, 1))
    )
    load_sharded_state(part_of(original, 0, 1, 1), folder, context_of(0, 1, 1))


def test_a_rank_without_weights_writes_no_file():
    assert in_parts([], 100) == []


class Shared:
    """A model whose names share memory in every way."""

    def __init__(self):
        self.all = torch.nn.Parameter(torch.arange(12.0).view(6, 2), requires_grad=False)
        self.other = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.none = torch.nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def get_parameter(self, name):
        return getattr(self, name)

    def slot(self, name, start, rows):
        shape = (rows, *self.get_parameter(name).shape[1:])
        return Slot(module=self, parameter=name, start=start, shape=shape)

    def weight_slots(self):
        return {
            "tail": self.slot("all", 4, 2),
            "whole": self.slot("all", 0, 6),
            "again": self.slot("all", 0, 6),
            "left": self.slot("other", 0, 2),
            "right": self.slot("other", 2, 2),
            "same": self.slot("other", 2, 2),
            "none": self.slot("none", 0, 0),
        }


def test_memory_that_several_names_share_is_saved_once():
    """The covering name stays, of equals the first in the alphabet."""
    assert sorted(held_tensors(Shared())) == ["again", "left", "none", "right"]


def test_elements_that_are_no_weights_are_refused():
    with pytest.raises(UnsupportedError, match=r"torch\.int8.*: codes"):
        described({"codes": torch.zeros(3, dtype=torch.int8)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_come_back_as_they_were(disk, tmp_path, folder, dtype):
    disk.folder(tmp_path / "original", torch.float32)
    original = read_description(tmp_path / "original")
    save(folder, original, 2, 1, dtype=dtype)
    assert read_description(folder).stored_dtype == dtype
    model = part_of(original, 1, 2, 1, getattr(torch, dtype))
    load_sharded_state(model, folder, context_of(1, 2, 1))
    expected = loaded(original, 1, 2, 1, getattr(torch, dtype))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class TestRefused:
    """Nothing is written to the model before everything adds up."""

    @pytest.fixture
    def saved(self, disk, tmp_path, folder):
        disk.folder(tmp_path / "original", torch.float32)
        original = read_description(tmp_path / "original")
        save(folder, original, 2, 1, max_size=50_000)
        return SimpleNamespace(folder=folder, original=original)

    def refuse(self, saved, message, model=None, context=None, touched=False):
        model = model or part_of(saved.original, 1, 2, 1)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_sharded_state(model, saved.folder, context or context_of(1, 2, 1))
        for parameter in model.parameters():
            assert touched or parameter.isnan().all(), "memory was touched"
        return str(caught.value)

    @pytest.mark.parametrize(
        ("tensor", "stages", "message"),
        [
            (1, 1, "tensor_parallel_size = 2"),
            (4, 1, "tensor_parallel_size = 2"),
            (2, 2, "pipeline_parallel_size = 1"),
        ],
    )
    def test_another_number_of_ranks(self, saved, tensor, stages, message):
        model = part_of(saved.original, 0, tensor, stages)
        self.refuse(saved, message, model, context_of(0, tensor, stages))

    def test_a_world_of_another_size(self, saved):
        context = evolve(context_of(1, 2, 1), world_size=3)
        self.refuse(saved, "the number of workers = 2", context=context)

    def edit(self, saved, change):
        path = saved.folder / MANIFEST
        document = json.loads(path.read_text())
        change(document["ranks"][1])
        path.write_text(json.dumps(document))

    def test_every_difference_is_listed(self, saved):
        name = "model.layers.0.mlp.up_proj.weight"

        def change(files):
            (home,) = (file["tensors"] for file in files if name in file["tensors"])
            home[name] = ["float32", [7, 64]]
            del files[-1]["tensors"]["model.norm.weight"]
            files[-1]["tensors"]["extra.weight"] = ["float32", [1]]

        self.edit(saved, change)
        text = self.refuse(saved, "tensors of rank 1 are not the model's")
        assert "1 missing: model.norm.weight" in text
        assert "1 without a place in the model: extra.weight" in text
        assert f"'{name}' is [7, 64] of float32, not [48, 64] of float32" in text

    def test_another_type(self, saved):
        model = part_of(saved.original, 1, 2, 1, torch.bfloat16)
        text = self.refuse(saved, "of float32, not", model)
        assert text.count("of bfloat16") == 5
        assert re.search(r"\d+ more differ", text)

    def test_a_missing_part(self, saved):
        part = read_manifest(saved.folder).files[1][1]
        (saved.folder / part.name).unlink()
        text = self.refuse(saved, "a part of the sharded state is missing")
        assert part.tensors[0].name in text

    def test_parts_that_changed_places(self, saved):
        first, second = (read_manifest(saved.folder).files[rank][0].name for rank in (0, 1))
        (saved.folder / first).rename(saved.folder / "aside")
        (saved.folder / second).rename(saved.folder / first)
        (saved.folder / "aside").rename(saved.folder / second)
        self.refuse(saved, "contents are not those that were saved", touched=True)

    def test_another_table(self, saved):
        files = read_manifest(saved.folder).files[1]
        path = saved.folder / files[0].name
        raw = path.read_bytes()
        name = files[0].tensors[0].name.encode()
        path.write_bytes(raw.replace(name, name[:-1] + b"T", 1))
        self.refuse(saved, "its table is not what")

    def test_one_bit(self, saved):
        path = saved.folder / read_manifest(saved.folder).files[1][0].name
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        self.refuse(saved, "contents are not those that were saved", touched=True)

    def test_a_part_that_is_a_link_out_of_the_folder(self, saved, tmp_path):
        path = saved.folder / read_manifest(saved.folder).files[1][0].name
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
        self.refuse(saved, "outside the folder")


def test_saving_where_nothing_can_be_written(original, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="is no folder; create it first"):
        save_sharded_state(loaded(original, 0, 1, 1), context_of(0, 1, 1), tmp_path / "absent")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"part-0.* cannot be written: No space left"):
        save_sharded_state(loaded(original, 0, 1, 1), context_of(0, 1, 1), tmp_path)


def test_both_ways_can_be_ended_by_the_driver(original, folder):
    ended = context_of(0, 1, 1, cancelled=lambda: True)
    with pytest.raises(CancelledStepError, match="saving was ended at"):
        save_sharded_state(loaded(original, 0, 1, 1), ended, folder)
    (folder / "model-rank-0-part-0.safetensors").unlink()
    save(folder, original, 1, 1)
    with pytest.raises(CancelledStepError, match="loading was ended at"):
        load_sharded_state(part_of(original, 0, 1, 1), folder, ended)
