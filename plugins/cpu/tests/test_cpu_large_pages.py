"""Weights in memory of large pages: the same numbers, together, and nothing taken too early."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hardpoint_cpu import large_pages
from hardpoint_engine import LLM, SamplingParams
from native_models import PROMPTS
from torch import nn


@pytest.mark.parametrize(
    ("setting", "had"),
    [("always [madvise] never", True), ("[always] madvise never", True),
     ("always madvise [never]", False), (None, False)],
)  # fmt: skip
def test_large_pages_are_asked_for_where_the_kernel_has_them(kernel, setting, had):
    root = kernel({} if setting is None else {large_pages.SETTING: setting})
    assert large_pages.can_be_had(large_pages.LEAST, root) is had
    assert not large_pages.can_be_had(large_pages.LEAST - 1, root)


def test_matrices_lie_next_to_each_other_from_the_first_large_page_on():
    first, second, third = large_pages.allocate([100, 64, 3])
    assert first.data_ptr() % large_pages.SIZE == 0
    assert second.data_ptr() == first.data_ptr() + 128
    assert third.data_ptr() == second.data_ptr() + 64
    assert [len(each) for each in (first, second, third)] == [100, 64, 3]
    assert not first.any()
    third.fill_(7)
    assert not first.any()
    assert not second.any()


def flags_at(address: int) -> set[str]:
    """Return the kernel's flags of the mapping that an address is in."""
    inside, flags = False, set()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            flags = set(rest)
    return flags


@pytest.mark.skipif(
    not large_pages.can_be_had(large_pages.LEAST), reason="not executed: the kernel gives none"
)
def test_the_kernel_is_asked_for_large_pages_of_private_memory():
    (memory,) = large_pages.allocate([large_pages.LEAST])
    assert {"hg", "sh"} & flags_at(memory.data_ptr()) == {
        "hg"
    }  # shared memory has rules of its own


@pytest.fixture
def wanted(monkeypatch):
    monkeypatch.setattr(large_pages, "can_be_had", lambda num_bytes: True)


def test_a_models_numbers_are_held_there(wanted):
    model = nn.Linear(5, 3).to(torch.bfloat16)
    model.register_parameter("steps", nn.Parameter(torch.tensor([4]), requires_grad=False))
    steps, weight = model.steps.data_ptr(), model.weight
    large_pages.hold(model)
    assert model.weight is weight
    assert (model.weight.shape, model.weight.dtype) == ((3, 5), torch.bfloat16)
    assert model.weight.data_ptr() % large_pages.SIZE == 0
    assert model.bias.data_ptr() == model.weight.data_ptr() + 64
    assert model.steps.data_ptr() == steps


def test_a_mapped_file_is_taken_over_whole(tmp_path):
    content = torch.randint(256, (2 * large_pages.SIZE + 12345,), dtype=torch.uint8)
    path = tmp_path / "weights"
    path.write_bytes(content.numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    taken = large_pages.take(mapped)
    assert torch.equal(taken, content)
    assert taken.data_ptr() % large_pages.SIZE == 0
    taken.fill_(0)
    assert path.read_bytes() == content.numpy().tobytes()


def places(worker):
    """Return the addresses of a model's parameters."""
    return sorted(each.data_ptr() for each in worker.get_model_runner().get_model().parameters())


def answers(folder, **keys):
    settings = {"threads": 1, **keys.pop("cpu", {})}
    with LLM(
        str(folder), platform="cpu", executor="uni", plugins={"cpu": settings},
        max_model_len=128, max_num_seqs=8, num_kv_blocks=40, **keys,
    ) as llm:  # fmt: skip
        made = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4))
        return [each.outputs[0].token_ids for each in made], llm.collective_rpc(places)[0]


def test_a_model_in_large_pages_answers_the_same(checkpoint, monkeypatch):
    folder = checkpoint("llama", torch.bfloat16)
    plain, _ = answers(folder)
    monkeypatch.setattr(large_pages, "can_be_had", lambda num_bytes: True)
    large, found = answers(folder)
    assert large == plain
    assert found[0] % large_pages.SIZE == 0
    assert found[-1] - found[0] < large_pages.SIZE


def test_packed_weights_are_taken_from_their_file_into_large_pages(
    checkpoint, tmp_path, monkeypatch
):
    folder = checkpoint("llama", torch.bfloat16)
    keys = {"quantization": "w8a8", "cpu": {"packed_cache": str(tmp_path)}}
    monkeypatch.setattr("hardpoint_cpu.quantization.LEAST_KEPT", 0)
    plain, _ = answers(folder, **keys)
    monkeypatch.setattr(large_pages, "can_be_had", lambda num_bytes: True)
    for kept in (1, 1, 0):
        if not kept:
            for path in tmp_path.iterdir():
                path.unlink()
        large, found = answers(folder, **keys)
        assert large == plain
        assert any(each % large_pages.SIZE == 0 for each in found)
        (file,) = tmp_path.iterdir()
        assert str(file) not in Path("/proc/self/maps").read_text()
