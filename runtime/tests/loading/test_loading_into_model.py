from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from hardpoint.checkpoints import read_description
from hardpoint.errors import CancelledStepError, CheckpointError
from hardpoint_runtime.loading import check_weights, load_into, open_weights
from hardpoint_runtime.loading.weights import Weights


class Recorded(Weights):
    """Weights that record what is read."""

    def __init__(self, shapes) -> None:
        self.shapes = shapes
        self.was_read: list[str] = []

    def read(self, name, dtype):
        self.was_read.append(name)
        return torch.ones(self.shapes[name], dtype=dtype)

    def close(self) -> None:
        pass


class Shelf:
    """The least model: it takes what it is given."""

    def __init__(self, shapes, ignorable=()) -> None:
        self.shapes = shapes
        self.ignorable = ignorable
        self.taken: list[str] = []
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def weight_shapes(self):
        return self.shapes

    def is_ignorable(self, name):
        return name in self.ignorable

    def load_weight(self, name, tensor):
        assert tuple(tensor.shape) == self.shapes[name]
        assert [ref() for ref in self.alive] == [None] * len(self.alive)
        self.alive.append(weakref.ref(tensor))
        self.taken.append(name)


SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


def test_every_weight_is_given_once_and_one_at_a_time():
    weights, model = Recorded(SHAPES), Shelf(SHAPES)
    assert load_into(model, weights, torch.bfloat16) == 2 * (6 + 4 + 1)
    assert model.taken == weights.was_read == ["a", "b", "c"]


def test_what_the_model_can_do_without_is_not_read():
    weights, model = Recorded({**SHAPES, "extra": (9,)}), Shelf(SHAPES, ignorable=["extra"])
    load_into(model, weights, torch.float32)
    assert weights.was_read == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"a": (2, 3)}, "2 weights of the model are missing: b, c"),
        ({**SHAPES, "extra": (9,)}, "1 weights have no place in the model .* extra"),
        ({**SHAPES, "a": (3, 2)}, r"weight 'a' has shape \[3, 2\], but its place .* \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(held, message):
    weights, model = Recorded(held), Shelf(SHAPES)
    with pytest.raises(CheckpointError, match=message):
        load_into(model, weights, torch.float32)
    with pytest.raises(CheckpointError, match=message):
        check_weights(model, weights)
    assert weights.was_read == []


def test_a_long_list_of_names_is_shortened():
    shapes = {f"w{index}": (1,) for index in range(300)}
    with pytest.raises(CheckpointError, match=r"300 weights .* w0, w1, w2, w3, w4 and 295 more"):
        check_weights(Shelf(shapes), Recorded({}))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelling_ends_between_two_tensors(after):
    weights, model = Recorded(SHAPES), Shelf(SHAPES)
    with pytest.raises(CancelledStepError, match="loading was ended"):
        load_into(model, weights, torch.float32, lambda: len(model.taken) >= after)
    assert len(weights.was_read) == after


@pytest.mark.parametrize("fails", [False, True])
def test_loading_keeps_to_its_thread_and_restores_the_number(monkeypatch, fails):
    def load_weight(name, tensor):
        seen.append(torch.get_num_threads())
        if fails:
            raise CheckpointError("broken")

    seen: list[int] = []
    model, before = Shelf(SHAPES), torch.get_num_threads()
    monkeypatch.setattr(model, "load_weight", load_weight)
    torch.set_num_threads(2)
    try:
        with pytest.raises(CheckpointError) if fails else nullcontext():
            load_into(model, Recorded(SHAPES), torch.float32)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["gguf", "safetensors", "dummy"])
def test_real_files_go_into_a_model(tmp_path, disk, format):
    if format == "gguf":
        expected = disk.gguf(tmp_path / "m", {}, "Q8_0")
    else:
        expected = disk.folder(tmp_path / "m", torch.float32, 2)
    description = read_description(tmp_path / "m", "dummy" if format == "dummy" else "auto")
    with open_weights(description) as weights:
        model = Shelf({name: tuple(values.shape) for name, values in expected.items()})
        load_into(model, weights, torch.float32)
    assert sorted(model.taken) == sorted(expected)
