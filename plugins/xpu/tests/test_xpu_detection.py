"""Which GPUs are seen, under which masks, and what is said where none is."""

from __future__ import annotations

import os

import pytest
from attrs import evolve
from hardpoint_runtime.accelerator.surroundings import Surroundings
from hardpoint_xpu.bfloat16 import family_of
from hardpoint_xpu.detection import look
from hardpoint_xpu.masks import MaskError, Root, shown
from hardpoint_xpu.selector import selected

ARC, MAX, IRIS = "0x56a1", "0x0bd5", "0x9a49"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_gpus_are_seen_with_name_and_memory(machine, count):
    seen = look(machine([ARC] * count))
    assert [device.id for device in seen.devices] == [str(n) for n in range(count)]
    assert {(d.name, d.memory_bytes) for d in seen.devices} == {("Intel Arc A", 16 << 30)}
    assert (seen.features, seen.reasons, seen.notes) == ({"bfloat16": True}, (), ())


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"cards": ()}, "no Intel GPU is there"),
        ({"vendor": "0x10de"}, "no Intel GPU is there"),
        ({"torch": {}}, "the package torch is not installed"),
        (
            {"torch": {"__version__": "2.13.0+cpu", "xpu": None}},
            "the installed torch (2.13.0+cpu) is not built for XPU",
        ),
        ({"environ": {"ZE_AFFINITY_MASK": "7"}}, "ZE_AFFINITY_MASK=7 leave no GPU"),
        ({"environ": {"ZE_AFFINITY_MASK": "a"}}, "ZE_AFFINITY_MASK=a: 'a' is not the number"),
        ({"environ": {"ZE_FLAT_DEVICE_HIERARCHY": "ROUND"}}, "none of FLAT, COMPOSITE, COMBINED"),
        ({"environ": {"ZE_FLAT_DEVICE_HIERARCHY": "flat"}}, "none of FLAT, COMPOSITE, COMBINED"),
        ({"environ": {"ONEAPI_DEVICE_SELECTOR": "opencl:*"}}, "SELECTOR=opencl:* leave no GPU"),
        ({"environ": {"ONEAPI_DEVICE_SELECTOR": "gpu"}}, "'gpu' has no colon"),
        ({"environ": {"ONEAPI_DEVICE_SELECTOR": "vulkan:0"}}, "names a backend that is none of"),
        ({"environ": {"ONEAPI_DEVICE_SELECTOR": "*:x"}}, "names the device 'x'"),
    ],
)
def test_each_reason_against_gpus_is_told(machine, what, reason):
    seen = look(machine(**({"cards": [ARC, ARC]} | what)))
    assert seen.devices == ()
    assert reason in "; ".join(seen.reasons)


def test_every_reason_is_told_at_once(machine):
    seen = look(machine(torch={"__version__": "2.13.0+cpu"}))
    assert len(seen.reasons) == 2


def test_this_machine_has_none():
    assert look(Surroundings()).devices == ()


def test_a_device_file_that_may_not_be_opened_is_told(machine, monkeypatch):
    around = machine([ARC])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = look(around).reasons[-1]
    assert told == "/dev/dri/renderD128 may not be opened by this user (group render)"


def test_under_wsl_the_build_of_torch_is_believed(machine):
    seen = look(machine(files={"dev/dxg": ""}))
    assert [device.name for device in seen.devices] == ["Intel GPU of the Windows host"]
    assert "the worker asks torch" in seen.notes[0]


# Types.


@pytest.mark.parametrize(
    ("number", "name", "bfloat16"),
    [
        ("0x56a1", "Arc A", True),
        ("0x56a0", "Arc A770", False),
        ("0x5690", "Arc A770", False),
        ("0x56C0", "Data Center GPU Flex", True),
        ("0x0bd5", "Data Center GPU Max", True),
        ("0xe20b", "Arc B", True),
        ("0x7d51", "Arc graphics of Arrow Lake H", True),
        ("0x7d41", "graphics of Arrow Lake U and S", False),
        ("0x7d67", "graphics of Arrow Lake U and S", False),
        ("0x7d55", "Arc graphics of Meteor Lake", False),
        ("0x7dd5", "Arc graphics of Meteor Lake", False),
        ("0x9a49", "Iris Xe", False),
    ],
)
def test_bfloat16_by_device_number(number, name, bfloat16):
    family = family_of(number)
    assert (family.name, family.bfloat16) == (name, bfloat16)


def test_a_device_that_is_not_listed_is_told(machine):
    seen = look(machine(["0x1234"]))
    assert family_of("0x1234") is None
    assert seen.features == {}
    assert "Intel GPU 0x1234: not listed" in seen.notes[0]


def test_of_mixed_gpus_the_least_counts_where_it_is_visible(machine):
    assert look(machine([ARC, IRIS])).features == {"bfloat16": False}
    alone = look(machine([ARC, IRIS], environ={"ZE_AFFINITY_MASK": "0"}))
    assert alone.features == {"bfloat16": True}


# Masks.


def test_tiles_are_devices_unless_cards_are_counted(machine):
    flat = look(machine([MAX, MAX], tiles=2))
    assert [device.memory_bytes for device in flat.devices] == [64 << 30] * 4
    cards = look(machine([MAX, MAX], tiles=2, environ={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}))
    assert [device.memory_bytes for device in cards.devices] == [128 << 30] * 2


@pytest.mark.parametrize(
    ("hierarchy", "mask", "seen"),
    [
        (None, None, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (None, "3,0", [(0, 1), (1, 1)]),
        (None, "", [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (None, "default", [(0, 1), (0, 1), (1, 1), (1, 1)]),
        ("", "1", [(0, 1)]),
        ("FLAT", "1", [(0, 1)]),
        ("COMPOSITE", None, [(0, 2), (1, 2)]),
        ("COMPOSITE", "1", [(1, 2)]),
        ("COMPOSITE", "1.0", [(1, 1)]),
        ("COMPOSITE", "0.0,0.1,1.5", [(0, 2)]),
        ("COMPOSITE", "", [(0, 2), (1, 2)]),
        ("COMPOSITE", "0.1,1", [(0, 1), (1, 2)]),
        ("COMBINED", "3,0", [(0, 1), (1, 1)]),
        ("COMBINED", "9", []),
    ],
)
def test_the_affinity_mask_filters(hierarchy, mask, seen):
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy, "ZE_AFFINITY_MASK": mask}
    environ = {name: value for name, value in environ.items() if value is not None}
    assert shown((2, 2), environ) == tuple(Root(card=card, tiles=tiles) for card, tiles in seen)


def test_tiles_cannot_be_named_where_they_are_the_devices():
    with pytest.raises(MaskError, match=r"'1\.0' is not the number of a device here"):
        shown((2,), {"ZE_AFFINITY_MASK": "1.0"})


def test_gpus_are_in_level_zeros_order(machine, tmp_path):
    """Cards of their own first, whatever their files are called; then by PCI address."""
    around = machine([IRIS, MAX, ARC])
    (tmp_path / "sys/class/drm/renderD128/device/drm/card0/lmem_total_bytes").unlink()
    for node, slot in (("128", "00:02.0"), ("129", "3a:00.0"), ("130", "03:00.0")):
        uevent = f"DRIVER=xe\nPCI_SLOT_NAME=0000:{slot}\n"
        (tmp_path / f"sys/class/drm/renderD{node}/device/uevent").write_text(uevent)
    names = ["Intel Arc A", "Intel Data Center GPU Max", "Intel Iris Xe"]
    assert [device.name for device in look(around).devices] == names
    by_bus = evolve(around, environ={"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"})
    assert [device.name for device in look(by_bus).devices] == [names[2], names[0], names[1]]
    second = evolve(around, environ={"ZE_AFFINITY_MASK": "1"})
    assert [device.name for device in look(second).devices] == [names[1]]


@pytest.mark.parametrize(
    ("selector", "seen"),
    [
        (None, "0123"),
        ("", "0123"),
        ("level_zero:0,2", "02"),
        ("level_zero:2,0", "02"),
        ("LEVEL_ZERO:gpu", "0123"),
        ("*:*", "0123"),
        ("*:gpu", "0123"),
        ("*:cpu", ""),
        ("opencl:gpu;level_zero:3", "3"),
        ("opencl:0", ""),
        ("!level_zero:1", "023"),
        ("level_zero:*;!level_zero:1,2", "03"),
        ("!opencl:*", "0123"),
        ("level_zero:1.0", "1"),
        ("level_zero:*.*", "0123"),
        ("level_zero:9", ""),
    ],
)
def test_the_selector_filters(selector, seen):
    assert "".join(map(str, selected(selector, 4))) == seen


def test_both_filter_one_after_the_other(machine):
    environ = {"ZE_AFFINITY_MASK": "1,2,3", "ONEAPI_DEVICE_SELECTOR": "level_zero:0,1"}
    seen = look(machine([ARC, MAX, MAX, IRIS], environ=environ))
    assert [d.name for d in seen.devices] == ["Intel Data Center GPU Max"] * 2
