"""What accelerators' platforms share: verdicts, types, placement, masks, and what they refuse."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import ClassVar

import pytest
from hardpoint.capabilities import Capability, Support
from hardpoint.config.schema import Config, DeviceConfig, GraphConfig, ParallelConfig
from hardpoint.records import Device
from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
from hardpoint_runtime.accelerator.settings import AcceleratorSettings
from hardpoint_runtime.accelerator.surroundings import Sighting, Surroundings, torch_build
from hardpoint_runtime.accelerator.visible_devices import choose, entries, logical
from hardpoint_runtime.offered import declared

UNITS = tuple(Device(id=str(n), name=name) for n, name in enumerate("AAB"))


class Units(AcceleratorPlatform):
    name: ClassVar[str] = "unit"
    torch_name: ClassVar[str] = "unit"
    collectives: ClassVar[str] = "uccl"
    untried: ClassVar[str] = "never run"
    graph_variables: ClassVar[Mapping[str, str]] = {"UCCL_REGISTER": "0"}
    masks: ClassVar[tuple[str, ...]] = ("UNIT_VISIBLE_DEVICES",)
    worker_class: ClassVar[str] = "x:Worker"
    model_runner_class: ClassVar[str] = "x:Runner"
    capabilities: ClassVar[Mapping[Capability, Support]] = declared(Capability.SLEEP)

    def __init__(self, settings=None, sees=None):
        super().__init__(settings)
        self.sees = Sighting(devices=UNITS) if sees is None else sees
        self.looked = 0

    def look(self):
        self.looked += 1
        return self.sees


def config(tensor=1, stages=1, **more):
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    return Config(parallel=parallel, **more)


def test_devices_make_it_available_and_it_says_what_was_never_tried():
    platform = Units(sees=Sighting(devices=UNITS, notes=("a note",)))
    verdict = platform.probe()
    assert (verdict.available, verdict.priority, verdict.devices) == (True, 100, UNITS)
    assert verdict.reason == "2 x A, 1 x B; a note; never run"
    platform.probe()
    assert platform.looked == 1


def test_what_the_devices_have_is_told():
    features = {
        "generation": "Seventh", "bfloat16": True, "float8": None, "tiles": False, "shared_kib": 64,
    }  # fmt: skip
    told = Units(sees=Sighting(devices=UNITS[:1], features=features)).probe().reason
    assert told == (
        "1 x A; generation Seventh, bfloat16, no float8, no tiles, shared_kib 64; never run"
    )


@pytest.mark.parametrize(
    ("sees", "reason"),
    [
        (Sighting(reasons=("no driver", "no torch")), "no driver; no torch"),
        (Sighting(), "no device is there"),
    ],
)
def test_without_devices_it_says_why(sees, reason):
    verdict = Units(sees=sees).probe()
    assert (verdict.available, verdict.reason) == (False, reason)


def test_a_substitute_is_usable_by_name_alone_and_says_what_it_is():
    settings = AcceleratorSettings(substitute="host", substitute_devices=2, substitute_bytes=7)
    platform = Units(settings, sees=Sighting(reasons=("none",)))
    verdict = platform.probe()
    assert (verdict.available, verdict.priority) == (True, -100)
    assert "plugins.unit.substitute = 'host'" in verdict.reason
    assert [(d.id, d.memory_bytes) for d in verdict.devices] == [("0", 7), ("1", 7)]
    assert platform.looked == 0


@pytest.mark.parametrize(
    ("features", "types"),
    [
        ({}, ("bfloat16", "float32", "float16")),
        ({"bfloat16": True}, ("bfloat16", "float32", "float16")),
        ({"bfloat16": False}, ("float32", "float16")),
    ],
)
def test_types_are_those_that_the_devices_compute_in(features, types):
    limits = Units(sees=Sighting(devices=UNITS, features=features)).limits(Config())
    assert (limits.dtypes, limits.default_dtype) == (types, types[0])


def test_a_substitute_computes_in_what_the_host_does_quickly():
    limits = Units(AcceleratorSettings(substitute="host")).limits(Config())
    assert (limits.default_dtype, set(limits.dtypes)) == (
        "float32", {"float32", "bfloat16", "float16"},
    )  # fmt: skip


def test_one_worker_for_each_device():
    placed = Units().placement(config(tensor=2, stages=3))
    assert (placed.num_workers, placed.devices_per_worker, placed.output_rank) == (6, 1, 4)
    assert placed.resources_per_worker == {"GPU": 1.0}
    assert placed.default_executor is None


@pytest.mark.parametrize(
    ("tensor", "stages", "mode", "settings", "has"),
    [
        (2, 1, None, {}, True),
        (2, 1, "full", {}, True),
        (2, 1, "none", {}, False),
        (2, 1, None, {"sleep": "off"}, False),
        (2, 1, None, {"substitute": "host"}, False),
        (1, 2, None, {}, False),
    ],
)
def test_no_variable_is_set_for_workers_but_for_collectives_in_graphs_over_what_sleeps(
    tensor, stages, mode, settings, has
):
    platform = Units(AcceleratorSettings(**settings))
    asked = config(tensor, stages, graph=GraphConfig(graph_mode=mode))
    found = platform.environment(asked, platform.placement(asked))
    assert found == ({"UCCL_REGISTER": "0"} if has else {})


@pytest.mark.parametrize(
    ("tensor", "stages", "executor", "key"),
    [
        (3, 1, None, None),
        (4, 1, None, "tensor_parallel_size"),
        (1, 4, "mp", "pipeline_parallel_size"),
        (4, 1, "uni", "tensor_parallel_size"),
        (4, 1, "ray", None),
    ],
)
def test_more_workers_than_devices_are_a_problem_where_all_are_here(tensor, stages, executor, key):
    problems = Units().check(config(tensor, stages, executor=executor))
    assert [problem.key for problem in problems] == ([key] if key else [])
    if key:
        assert "needs 4 devices, one for each worker, and this process sees 3" in str(problems[0])


def test_a_mask_that_hides_devices_is_named_as_the_way_out(monkeypatch):
    monkeypatch.setenv("UNIT_VISIBLE_DEVICES", "0,1,2")
    (problem,) = Units().check(config(4))
    assert problem.way_out == "Lower it, or show more with UNIT_VISIBLE_DEVICES."


@pytest.mark.parametrize(
    ("devices", "bad"), [(("0", "2"), None), (("0", "3"), "'3'"), (("a",), "'a'")]
)
def test_devices_by_logical_number(devices, bad):
    problems = Units().check(config(device=DeviceConfig(devices=devices)))
    assert bool(problems) == (bad is not None)
    if bad:
        assert problems[0].key == "devices"
        assert f"{bad} is none of the 3 devices that this process sees" in problems[0].message


@pytest.mark.parametrize(
    ("mask", "given", "devices"),
    [
        (None, ("3", "6"), ("3", "6")),
        ("3,6", ("3", "6"), ("0", "1")),
        ("6,3", ("3", "6"), ("1", "0")),
        ("GPU-a, GPU-b", ("GPU-b",), ("1",)),
        ("0,1", ("7",), ("7",)),
        ("3,6", (), ()),
    ],
)
def test_what_a_launcher_gives_is_counted_under_its_mask(monkeypatch, mask, given, devices):
    if mask is not None:
        monkeypatch.setenv("UNIT_VISIBLE_DEVICES", mask)
    assert Units().assigned_devices({"GPU": given, "other": ("9",)}) == devices
    assert logical(given, mask) == devices


@pytest.mark.parametrize(("forked", "safe"), [(False, True), (True, False)])
def test_a_process_forked_of_one_that_had_the_device_is_not_forked_again(monkeypatch, forked, safe):
    monkeypatch.delitem(sys.modules, "torch.unit", raising=False)
    assert Units().fork_safe().safe
    module = types.SimpleNamespace(_is_in_bad_fork=lambda: forked)
    monkeypatch.setitem(sys.modules, "torch.unit", module)
    assert Units().fork_safe().safe is safe


def test_every_capability_is_declared():
    assert set(Units.capabilities) == set(Capability)
    assert Units().support(Capability.SLEEP) is Support.YES
    assert Units().support(Capability.LORA) is Support.NOT_YET


# Masks.


def by_name(*names):
    return lambda wanted: [n for n, name in enumerate(names) if name.startswith(wanted)]


@pytest.mark.parametrize(
    ("mask", "positions", "complaint"),
    [
        ("1,0", (1, 0), None),
        ("b,a", (1, 0), None),
        ("", (), None),
        ("0,5,1", (0,), "'5' names no device"),
        ("0,-1", (0,), "'-1' names no device"),
        ("c,1", (), "'c' fits several devices"),
        ("0,a", (), "'a' is named twice"),
        ("0,,1", (0,), None),
    ],
)
def test_what_a_mask_leaves(mask, positions, complaint):
    chosen = choose(mask, 4, by_name("a", "b", "c1", "c2"))
    assert chosen.positions == positions
    if complaint:
        assert chosen.complaint == complaint


def test_an_empty_mask_has_no_entries():
    assert entries(" ") == ()
    assert entries("a, b") == ("a", "b")


# The build of torch.


def test_what_torch_was_built_for_is_read_without_importing_it():
    import torch

    build = torch_build()
    assert build["__version__"] == torch.__version__
    assert build["git_version"] == torch.version.git_version


@pytest.mark.parametrize("text", ["x = (", None])
def test_a_build_that_cannot_be_read_is_empty(monkeypatch, tmp_path, text):
    import importlib.util

    if text is not None:
        (tmp_path / "version.py").write_text(text)
    origin = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: origin)
    assert torch_build() == {}


def test_files_are_read_below_the_root(tmp_path):
    (tmp_path / "a").write_text("text\n\0")
    around = Surroundings(root=tmp_path)
    assert (around.read("a"), around.read("b"), around.has("a"), around.has("b")) == (
        "text", None, True, False,
    )  # fmt: skip
