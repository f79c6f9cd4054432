"""Packed weights that are kept: mapped by a second start, and never believed."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from hardpoint_cpu import packed_cache, quantization
from hardpoint_cpu.native import packing
from hardpoint_cpu.packed_cache import HEAD, PackedCache, cache_folder, key_of
from hardpoint_engine import LLM, SamplingParams
from hardpoint_runtime.quantization import form_of
from native_models import PROMPTS

SIZE = 3 * 4096
KEY = "0" * 64


@pytest.fixture
def cache(tmp_path):
    return PackedCache(tmp_path / "cache", 1 << 20)


def keep(cache, key=KEY, fill=b"weights", size=SIZE):
    new = cache.begin(key, size)
    new.weights[: len(fill)] = fill
    memory = new.finish()
    new.close()
    return memory


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir())


def test_what_was_kept_is_mapped_and_writing_changes_no_file(cache):
    first = keep(cache)
    first[0] = ord("x")
    found = cache.open(KEY, SIZE)
    assert found[:7] == b"weights"
    found[0] = ord("y")
    assert cache.open(KEY, SIZE)[:7] == b"weights"
    assert cache.open("1" * 64, SIZE) is None
    path = cache.folder / files(cache)[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def flipped(path):
    with path.open("r+b") as file:
        file.seek(HEAD + 5)
        file.write(b"!")


def short(path):
    os.truncate(path, HEAD + SIZE - 1)


def empty(path):
    os.truncate(path, 0)


def longer(path):
    os.truncate(path, HEAD + SIZE + 4096)


def announced(path):
    with path.open("r+b") as file:
        file.write(path.read_bytes()[:HEAD].replace(str(SIZE).encode(), b"99999"))


def other_key(path):
    with path.open("r+b") as file:
        file.write(path.read_bytes()[:HEAD].replace(b"0" * 64, b"2" * 64))


@pytest.mark.parametrize("damage", [flipped, short, empty, longer, announced, other_key])
def test_a_damaged_file_is_removed_with_one_line(cache, damage, caplog):
    keep(cache)
    damage(cache.folder / files(cache)[0])
    with caplog.at_level(logging.INFO):
        assert cache.open(KEY, SIZE) is None
    assert len(caplog.records) == 1
    assert files(cache) == []


def test_a_file_that_is_not_finished_leaves_nothing(cache):
    new = cache.begin(KEY, SIZE)
    new.weights[0] = 1
    new.close()
    assert files(cache) == []


def test_the_oldest_go_when_all_would_be_too_large(tmp_path):
    cache = PackedCache(tmp_path / "cache", 3 * (HEAD + SIZE))
    for age, letter in enumerate("abc"):
        keep(cache, letter * 64)
        os.utime(cache.folder / f"{letter * 64}.packed", (age, age))
    assert cache.open("a" * 64, SIZE)  # used now
    (cache.folder / ".x.packed.7").write_bytes(b"of one that was killed")
    os.utime(cache.folder / ".x.packed.7", (0, 0))
    keep(cache, "d" * 64)
    assert files(cache) == [f"{letter * 64}.packed" for letter in "acd"]
    assert PackedCache(cache.folder, SIZE).begin(KEY, SIZE) is None


def test_a_folder_that_others_may_write_is_not_used(cache, caplog):
    keep(cache)
    cache.folder.chmod(0o777)
    assert cache.open(KEY, SIZE) is None
    assert cache.begin(KEY, SIZE) is None
    assert "others may write it" in caplog.text


def test_a_link_is_not_followed(cache, tmp_path):
    keep(cache)
    (cache.folder / f"{'1' * 64}.packed").symlink_to(cache.folder / f"{KEY}.packed")
    assert cache.open("1" * 64, SIZE) is None


def test_a_full_disk_is_told_and_nothing_is_kept(cache, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache.os, "posix_fallocate", full)
    with caplog.at_level(logging.INFO):
        assert cache.begin(KEY, SIZE) is None
    assert "No space left" in caplog.text
    assert files(cache) == []


def test_the_key_is_of_contents_and_of_the_way_to_pack(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(bytes(range(256)) * 4096)
    os.utime(path, (1, 1))
    key = key_of([path], ["w8a8"])
    assert key == key_of([path], ["w8a8"])
    assert key != key_of([path], ["w4a8"])
    data = bytearray(path.read_bytes())
    data[500_000] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))
    assert key != key_of([path], ["w8a8"])


def test_where_the_folder_is():
    assert str(cache_folder("auto", {"XDG_CACHE_HOME": "/x"})) == "/x/hardpoint/packed"
    assert str(cache_folder("auto", {"HOME": "/h"})) == "/h/.cache/hardpoint/packed"
    assert cache_folder("none", {}) is None


def answers(folder, cache, **keys):
    settings = {"threads": 1, "native": "auto", "packed_cache": str(cache), **keys}
    llm = LLM(
        str(folder), platform="cpu", executor="uni", max_model_len=128, num_kv_blocks=40,
        quantization="w8a8", plugins={"cpu": settings},
    )  # fmt: skip

    def files_of(worker):
        """Return the numbers of the files that the model's matrices are mapped from."""
        places = [
            each.data_ptr()
            for each in worker.get_model_runner().get_model().parameters()
            if each.dtype == torch.uint8
        ]
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        return {
            int(lines[index][4])
            for place in places
            for index, (start, stop) in enumerate(spans)
            if start <= place < stop
        }

    with llm:
        made = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4))
        mapped = llm.collective_rpc(files_of)[0]
    return [each.outputs[0].token_ids for each in made], mapped


def test_a_second_start_packs_nothing_and_maps_the_file(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "LEAST_KEPT", 0)
    folder, cache = checkpoint("llama", torch.bfloat16), tmp_path / "cache"
    packed = []
    pack = packing.pack
    monkeypatch.setattr(
        packing, "pack", lambda *args, **how: packed.append(args[2]) or pack(*args, **how)
    )
    first, mapped = answers(folder, cache)
    (kept,) = cache.iterdir()
    assert mapped == {kept.stat().st_ino}
    assert packed
    packed.clear()
    assert answers(folder, cache) == (first, mapped)
    assert not packed
    flipped(kept)
    assert answers(folder, cache)[0] == first
    assert packed


def test_nothing_is_kept_where_that_is_turned_off(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "LEAST_KEPT", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = checkpoint("llama", torch.bfloat16)
    answers(folder, "none")
    answers(folder, tmp_path / "small", packed_cache_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_several_threads_pack_what_one_packs(monkeypatch):
    numbers = torch.randn(
        3 * quantization.PANEL + 5, 64, generator=torch.Generator().manual_seed(1)
    )
    made = []
    for cores in (1, 3):
        monkeypatch.setattr(quantization, "SPLIT", 1)
        monkeypatch.setattr(quantization, "_cores", lambda cores=cores: cores)
        size = packing.packed_bytes("int8", 80, 64)
        part = quantization.PackedPart(kind="int8", first=0, rows=80, offset=0, num_bytes=size)
        form = quantization.NativeForm(80, 64, [part], torch.float32, whole=True)
        memory = torch.zeros(size, dtype=torch.uint8)
        form.pack(memory, 7, numbers)
        made.append(memory)
    assert torch.equal(*made)
    assert form_of(torch.nn.Module(), "weight") is None
