"""Which GPUs are seen, under which masks, and what is said where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from fake_amdsmi import FakeSmi, gpu
from hardpoint_rocm.amdsmi_port import SmiAbsentError, import_smi, read_gpus
from hardpoint_rocm.detection import RocmSurroundings, look
from hardpoint_rocm.gfx import FEATURES, features_of, name_of
from hardpoint_rocm.masks import visible

EIGHT = tuple(gpu(n) for n in range(8))


@pytest.mark.parametrize("count", [1, 8])
def test_gpus_are_seen_with_name_and_memory(machine, count):
    seen = look(machine(EIGHT[:count]))
    assert [device.id for device in seen.devices] == [str(n) for n in range(count)]
    assert {(d.name, d.memory_bytes) for d in seen.devices} == {
        ("AMD Instinct MI300X (gfx942)", 192 << 30)
    }
    assert seen.features == {
        "architecture": "CDNA 3", "bfloat16": True, "float8": "fnuz", "wave": 64, "shared_kib": 64,
    }  # fmt: skip
    assert (seen.reasons, seen.notes) == ((), ())


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"gpus": ()}, "AMD SMI knows of no GPU"),
        ({"fails": "Driver not loaded"}, "AMD SMI: Driver not loaded"),
        ({"lost": 1}, "AMD SMI: Error code: 49 | AMDSMI_STATUS_NO_DATA"),
        ({"torch": {}}, "the package torch is not installed"),
        (
            {"torch": {"__version__": "2.13.0+cu130", "cuda": "13.0", "hip": None}},
            "the installed torch (2.13.0+cu130) is not built for ROCm",
        ),
        ({"gpus": (gpu(0, "gfx803", "Fiji"),)}, "Fiji is a gfx803, which the kernels are not made"),
        ({"environ": {"HIP_VISIBLE_DEVICES": ""}}, "hide every GPU"),
        ({"environ": {"ROCR_VISIBLE_DEVICES": "9"}}, "'9' names no device"),
        (
            {"environ": {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}},
            "HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 differ",
        ),
    ],
)
def test_each_reason_against_gpus_is_told(machine, what, reason):
    seen = look(machine(**({"gpus": EIGHT} | what)))
    assert seen.devices == ()
    assert reason in "; ".join(seen.reasons)


def test_every_reason_is_told_at_once(machine):
    around = machine(torch={"__version__": "2.13.0+cpu"}, files={"dev/kfd": ""})
    build, *others = look(around).reasons
    assert build.startswith("the installed torch (2.13.0+cpu) is not built for ROCm: install ")
    assert tuple(others) == (
        "the library of AMD SMI (libamd_smi.so) is not installed",
        "/sys/class/kfd/kfd/topology/nodes shows no GPU",
    )


def test_without_the_drivers_device_the_library_is_not_even_asked(machine):
    around = evolve(machine(), smi=lambda: pytest.fail("asked"))
    assert look(around).reasons == ("no device file /dev/kfd is there",)


@pytest.mark.parametrize("lost", [None, 3])
def test_the_library_is_closed_whatever_it_says(machine, lost):
    around = machine(EIGHT, lost=lost)
    look(around)
    assert around.smi().opened == 0


def test_partitions_are_devices_and_told(machine):
    parts = tuple(gpu(0, partition="CPX", memory=24 << 30) for _ in range(8))
    seen = look(machine(parts))
    assert len(seen.devices) == 8
    assert seen.notes == ("GPUs are divided (CPX): each partition is a device",)
    assert look(machine((gpu(0, partition=None),))).notes == ()


def test_of_mixed_gpus_the_least_counts(machine):
    seen = look(machine((gpu(0, "gfx950"), gpu(1, "gfx1100", "Radeon RX 7900 XTX"))))
    features = dict(seen.features)
    assert features.pop("architecture").count(" and ") == 1
    assert features == {"bfloat16": True, "float8": None, "wave": None, "shared_kib": 64}


# Masks: the table of hardpoint_rocm.masks.

UUIDS = [f"8a6f1c9e000{n}0000" for n in range(4)]


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "seen"),
    [
        (None, None, None, "0123"),
        ("3,1", None, None, "31"),
        (None, "3,1", None, "31"),
        (None, None, "3,1", "31"),
        (None, "2,0", "2,0", "20"),
        (None, "2, 0", "2,0", "20"),
        ("3,1", "1", None, "1"),
        ("3,1", None, "0", "3"),
        ("3,1", "1,0", "1,0", "13"),
        ("GPU-8a6f1c9e00020000,0", None, None, "20"),
        (None, "GPU-8A6F1C9E00030000", None, "3"),
        ("3,2", "GPU-8a6f1c9e00020000", None, "2"),
        ("3,2", "GPU-8a6f1c9e00000000", None, ""),
        ("", None, None, ""),
        (None, "-1", None, ""),
    ],
)
def test_masks_hide_one_after_the_other(rocr, hip, cuda, seen):
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    environ = {
        name: value
        for name, value in zip(names, (rocr, hip, cuda), strict=True)
        if value is not None
    }
    found = visible(UUIDS, environ)
    assert "".join(map(str, found.positions)) == seen
    assert found.conflict is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}, "differ"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1,0"}, "differ"),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,1"}, "names more devices than"),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, "names more devices than"),
    ],
)
def test_masks_that_contradict_each_other_are_a_conflict(environ, words):
    found = visible(UUIDS, environ)
    assert words in found.conflict
    assert found.positions == ()


# Instruction sets.


def test_the_kernels_numbers_name_instruction_sets():
    numbers = {
        90402: "gfx942",
        90010: "gfx90a",
        110000: "gfx1100",
        100300: "gfx1030",
        90500: "gfx950",
    }
    assert {number: name_of(number) for number in numbers} == numbers


def test_features_by_instruction_set():
    assert features_of("gfx90a:sramecc+:xnack-") is FEATURES["gfx90a"]
    assert (FEATURES["gfx90a"].float8, FEATURES["gfx942"].float8) == (None, "fnuz")
    assert (FEATURES["gfx950"].float8, FEATURES["gfx1200"].float8) == ("ocp", "ocp")
    waves = {name: features.wave for name, features in FEATURES.items()}
    assert {name for name, wave in waves.items() if wave == 64} == {
        name for name in FEATURES if name.startswith("gfx9")
    }
    assert FEATURES["gfx950"].lds_kib == 160
    assert features_of("gfx906") is None
    assert features_of("gfx1030") is None


COMPILED = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def copy(source, target, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(target + places, tl.load(source + places))

for name, wave in zip(sys.argv[1::2], sys.argv[2::2]):
    kernel = ASTSource(
        fn=copy, signature={"source": "*fp32", "target": "*fp32", "size": "constexpr"},
        constexprs={"size": 64},
    )
    made = triton.compile(kernel, target=GPUTarget("hip", name, int(wave)))
    print(name, len(made.asm["hsaco"]), made.metadata.warp_size)
"""


@pytest.mark.slow
def test_triton_compiles_for_what_is_listed(tmp_path):
    """And for no less: an RDNA 2 has no place in the table as long as it has none in Triton."""
    pytest.importorskip("triton")
    program = tmp_path / "compiled.py"
    program.write_text(COMPILED)

    def compiled(names):
        waves = {name: str(FEATURES[name].wave if name in FEATURES else 32) for name in names}
        done = subprocess.run(
            [sys.executable, program, *(word for pair in waves.items() for word in pair)],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return {line.split()[0]: int(line.split()[2]) for line in done.stdout.splitlines()}

    assert compiled(FEATURES) == {name: features.wave for name, features in FEATURES.items()}
    assert compiled(["gfx1030"]) == {}


# Without the library.

NODE = "sys/class/kfd/kfd/topology/nodes"
PROPERTIES = (
    "cpu_cores_count 0\nsimd_count 304\ngfx_target_version 90402\nunique_id 9976000000000123456\n"
)
TOPOLOGY = {
    "dev/kfd": "",
    f"{NODE}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
    f"{NODE}/2/properties": PROPERTIES,
    f"{NODE}/2/name": "ip discovery\n",
    f"{NODE}/2/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 << 30}\n",
    f"{NODE}/10/properties": "simd_count 208\ngfx_target_version 90010\n",
}  # fmt: skip


@pytest.mark.parametrize("absent", [KeyError, OSError, AttributeError, ModuleNotFoundError])
def test_without_the_library_the_drivers_files_tell(machine, absent, capsys):
    seen = look(machine(files=TOPOLOGY, absent=absent))
    assert [(d.name, d.memory_bytes) for d in seen.devices] == [
        ("ip discovery (gfx942)", 192 << 30), ("AMD GPU (gfx90a)", None),
    ]  # fmt: skip
    assert "found by the system's files" in seen.notes[0]
    assert capsys.readouterr().out == ""


def test_a_library_that_fails_is_no_verdict_where_the_files_show_gpus(machine):
    seen = look(machine(files=TOPOLOGY, fails="AMDSMI_STATUS_NOT_INIT"))
    assert len(seen.devices) == 2
    assert "AMDSMI_STATUS_NOT_INIT" in seen.notes[0]


def test_a_device_file_that_may_not_be_opened_is_told(machine, monkeypatch):
    around = machine(files=TOPOLOGY)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (reason,) = look(around).reasons
    assert reason.startswith("/dev/kfd may not be opened by this user: it takes the groups render")


def test_a_library_that_answers_is_no_right_to_compute(machine, monkeypatch):
    around = machine(EIGHT)
    assert len(look(around).devices) == 8
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    seen = look(around)
    assert seen.devices == ()
    assert "usermod -aG render,video" in seen.reasons[0]


def test_a_driver_without_gpus_is_told(machine):
    assert look(machine(files={"dev/kfd": ""})).reasons[-1].endswith("shows no GPU")


def test_under_wsl_the_build_of_torch_is_believed(machine):
    files = {"dev/dxg": "", "usr/lib/wsl/lib/libdxcore.so": ""}
    assert [d.name for d in look(machine(files=files)).devices] == ["GPU of the Windows host"]
    other = machine(files=files, torch={"__version__": "2.13.0+cpu", "hip": None})
    (reason,) = look(other).reasons
    assert reason.startswith("the installed torch (2.13.0+cpu) is not built for ROCm: install ")


def test_wsl_without_its_library_is_told(machine):
    assert "libdxcore.so is not" in look(machine(files={"dev/dxg": ""})).reasons[-1]


# The real library. Its package lies apart: Ray 2.60 cannot be imported where that fails to.


@pytest.fixture
def package(monkeypatch):
    folder = Path(sys.prefix) / "apart"
    if not (folder / "amdsmi").is_dir():
        pytest.skip(f"no amdsmi in {folder}: `make test` installs it")
    monkeypatch.syspath_prepend(folder)
    return folder / "amdsmi" / "__init__.py"


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="there is a driver here")
def test_the_real_library_is_not_found_here(package, capsys):
    with pytest.raises(KeyError):
        import_smi()
    capsys.readouterr()
    with pytest.raises(SmiAbsentError, match=r"libamd_smi\.so"):
        read_gpus()
    assert capsys.readouterr().out == ""
    assert "no device file /dev/kfd is there" in look(RocmSurroundings()).reasons


def test_what_is_asked_is_in_the_package(package):
    """The package cannot be imported without its library: its source says what it has."""
    text = package.read_text()
    asked = [name for name in vars(FakeSmi) if name.lower().startswith("amdsmi")]
    assert len(asked) == 9
    assert [name for name in asked if f" import {name}\n" not in text] == []
    interface = package.with_name("amdsmi_interface.py").read_text()
    told = interface.partition("def amdsmi_get_gpu_asic_info(")[2].partition("\ndef ")[0]
    assert all(f'"{key}": ' in told for key in FakeSmi([gpu(0)]).asic_keys)
