"""Which GPUs are seen, under which masks, and what is said where none is."""

from __future__ import annotations

import os
from pathlib import Path

import fake_nvml
import pytest
from fake_nvml import gpu
from hardpoint_cuda import nvml
from hardpoint_cuda.detection import CudaSurroundings, look
from hardpoint_cuda.nvml import NvmlAbsentError, read_gpus

EIGHT = tuple(gpu(n) for n in range(8))


def names(seen):
    return [device.name for device in seen.devices]


@pytest.mark.parametrize("count", [1, 8])
def test_gpus_are_seen_with_name_and_memory(machine, count):
    seen = look(machine(EIGHT[:count]))
    assert [device.id for device in seen.devices] == [str(n) for n in range(count)]
    assert {(d.name, d.memory_bytes) for d in seen.devices} == {("NVIDIA H200", 141 << 30)}
    assert seen.features == {
        "generation": "Hopper", "bfloat16": True, "float8": True, "shared_kib": 227,
    }  # fmt: skip
    assert (seen.reasons, seen.notes) == ((), ())


def test_a_driver_without_gpus_is_told(machine):
    seen = look(machine(()))
    assert (seen.devices, seen.reasons) == ((), ("NVML knows of no GPU",))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"fails": fake_nvml.NVML_ERROR_DRIVER_NOT_LOADED}, "NVML: Driver Not Loaded"),
        ({"fails": fake_nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}, "NVML: Driver/library version"),
        ({"lost": 1}, "NVML: GPU is lost"),
        ({"torch": {}}, "the package torch is not installed"),
        (
            {"torch": {"__version__": "2.13.0+cpu", "cuda": None}},
            "the installed torch (2.13.0+cpu) is not built for CUDA",
        ),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES= hides every GPU"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "-1"}}, "'-1' names no device"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "9"}}, "'9' names no device"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}}, "'NoDevFiles' names no device"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "1,0,1"}}, "'1' is named twice"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "GPU-8a"}}, "'GPU-8a' fits several devices"),
    ],
)
def test_each_reason_against_gpus_is_told(machine, what, reason):
    seen = look(machine(EIGHT, **what))
    assert seen.devices == ()
    assert any(told.startswith(reason) or reason in told for told in seen.reasons), seen.reasons


def test_every_reason_is_told_at_once(machine):
    seen = look(machine(torch={"__version__": "2.13.0+cpu", "cuda": None}))
    build, *others = seen.reasons
    assert build.startswith("the installed torch (2.13.0+cpu) is not built for CUDA: install ")
    assert tuple(others) == (
        "NVML: NVML Shared Library Not Found",
        "no device file /dev/nvidia* is there",
    )


@pytest.mark.parametrize("broken", [None, 3])
def test_nvml_is_closed_whatever_it_says(machine, broken):
    around = machine(EIGHT, lost=broken)
    look(around)
    assert around.nvml().opened == 0


def test_an_old_driver_knows_of_no_instances(machine):
    assert len(look(machine(EIGHT, without={"nvmlDeviceGetMigMode"})).devices) == 8


# Masks.


def visible_uuids(machine, gpus, mask):
    from hardpoint_cuda.visible_gpus import visible

    return [unit.id[-4:] for unit in visible(read_gpus(machine(gpus).nvml), mask).units]


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, "01234567"),
        ("3,6", "36"),
        (" 6 , 3", "63"),
        ("GPU-8a6f1c9e-0006,GPU-8a6f1c9e-0003", "63"),
        ("GPU-8a6f1c9e-0006,3", "63"),
        ("0,1,-1,2", "01"),
        ("0,99,1", "0"),
        ("", ""),
        ("2,2", ""),
    ],
)
def test_masks_by_number_and_uuid(machine, mask, seen):
    assert visible_uuids(machine, EIGHT, mask) == [f"000{n}" for n in seen]


DIVIDED = (gpu(0), gpu(1, slices=["1g", None, "2g"]), gpu(2, slices=[None]), gpu(3))


@pytest.mark.parametrize(
    ("mask", "found", "note"),
    [
        (None, "1g", "of 3 devices one is used: with MIG a process sees one instance"),
        ("1", "1g", None),
        ("MIG-12aa-0002", "2g", None),
        ("MIG-12aa-0002,MIG-10aa-0000", "2g", "of 2 devices one is used"),
        ("0,3", "NVIDIA H200", None),
        ("2", None, "GPU 2 is divided (MIG) and has no instance"),
    ],
)
def test_of_divided_gpus_one_instance_is_seen(machine, mask, found, note):
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    seen = look(machine(DIVIDED, environ=environ))
    assert set(names(seen)) == ({found} if found else set())
    told = "; ".join((*seen.notes, *seen.reasons))
    assert note in told if note else not told


def test_the_memory_of_an_instance_is_its_own(machine):
    (device,) = look(machine(DIVIDED, environ={"CUDA_VISIBLE_DEVICES": "1"})).devices
    assert device.memory_bytes == (141 << 30) // 7


# Kinds.

MIXED = (gpu(0, "NVIDIA A100", capability=(8, 0)), gpu(1, "Tesla T4", capability=(7, 5)))


def test_of_mixed_gpus_the_least_counts_and_their_order_is_told(machine):
    seen = look(machine(MIXED))
    assert seen.features["bfloat16"] is seen.features["float8"] is False
    assert seen.features["shared_kib"] == 64
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in seen.notes[0]
    by_bus = look(machine(MIXED, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert by_bus.notes == ()
    alone = look(machine(MIXED, environ={"CUDA_VISIBLE_DEVICES": "0"}))
    assert (alone.features["bfloat16"], alone.notes) == (True, ())


def test_a_gpu_that_is_too_old_is_told_unless_it_is_hidden(machine):
    old = (gpu(0), gpu(1, "Tesla P100", capability=(6, 0)))
    assert look(machine(old)).reasons == (
        "Tesla P100 has compute capability 6.0, 7.5 is the least of torch 2.13.0 for CUDA 13.0",
    )
    assert names(look(machine(old, environ={"CUDA_VISIBLE_DEVICES": "0"}))) == ["NVIDIA H200"]


def test_what_torch_was_built_for_decides_about_volta(machine):
    volta = (gpu(0, "Tesla V100", capability=(7, 0)),)
    assert "7.5 is the least of torch 2.13.0 for CUDA 13.0" in look(machine(volta)).reasons[0]
    older = {"__version__": "2.13.0+cu126", "cuda": "12.6"}
    assert names(look(machine(volta, torch=older))) == ["Tesla V100"]


# Without NVML.

INFORMATION = "Model: \t\t NVIDIA L4\nGPU UUID: \t GPU-8a6f1c9e-0004\nDevice Minor: \t 4\n"


def test_without_nvml_device_files_and_the_kernels_driver_tell(machine):
    files = {
        "dev/nvidia4": "", "dev/nvidia10": "", "dev/nvidiactl": "",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": INFORMATION,
    }  # fmt: skip
    seen = look(machine(files=files))
    assert names(seen) == ["NVIDIA L4", "NVIDIA GPU"]
    assert [device.memory_bytes for device in seen.devices] == [None, None]
    assert seen.features == {}
    assert "found by its files, without memory or generation (NVML: NVML Shared" in seen.notes[0]


def test_a_device_file_that_may_not_be_opened_is_told(machine, monkeypatch):
    around = machine(files={"dev/nvidia0": ""})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert look(around).reasons[-1].endswith("dev/nvidia0 may not be opened by this user")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, "GPU of the Windows host"),
        (
            {"proc/device-tree/compatible": "nvidia,p3767\0nvidia,tegra234\0",
             "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0"},
            "NVIDIA Jetson Orin Nano",
        ),
    ],
)  # fmt: skip
def test_wsl_and_boards_are_seen_without_nvml(machine, files, found):
    assert names(look(machine(files=files))) == [found]


def test_wsl_without_the_library_is_told(machine):
    assert "libcuda.so.1 is not" in look(machine(files={"dev/dxg": ""})).reasons[-1]


def test_masks_hold_without_nvml_too(machine):
    files = {f"dev/nvidia{n}": "" for n in range(3)}
    seen = look(machine(files=files, environ={"CUDA_VISIBLE_DEVICES": "2,0"}))
    assert len(seen.devices) == 2


# The real library.


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_the_real_library_is_not_found_here():
    with pytest.raises(NvmlAbsentError, match="NVML Shared Library Not Found"):
        read_gpus()
    assert "NVML: NVML Shared Library Not Found" in look(CudaSurroundings()).reasons


def test_without_the_package_nvml_is_absent():
    def load():
        raise ImportError("pynvml")

    with pytest.raises(NvmlAbsentError, match="nvidia-ml-py is not installed"):
        read_gpus(load)


def test_what_is_asked_of_nvml_is_in_the_package():
    library = nvml.import_nvml()
    asked = [name for name in vars(fake_nvml.FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(asked) > 12
    assert [name for name in asked if not hasattr(library, name)] == []
    for name in ("NOT_SUPPORTED", "NOT_FOUND", "LIBRARY_NOT_FOUND", "FUNCTION_NOT_FOUND"):
        constant = f"NVML_ERROR_{name}"
        assert getattr(library, constant) == getattr(fake_nvml, constant)
