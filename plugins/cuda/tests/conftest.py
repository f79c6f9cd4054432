"""A made-up driver library, and machines that have it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_nvml
from hardpoint_cuda.detection import CudaSurroundings

BUILT = {"__version__": "2.13.0", "cuda": "13.0", "hip": None}


@pytest.fixture
def machine(tmp_path):
    """Return what detection sees of a machine: its GPUs (None: no library), variables, files."""

    def make(gpus=None, *, environ=None, torch=BUILT, files=(), **library) -> CudaSurroundings:
        for name, text in dict(files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if gpus is None:
            library.setdefault("fails", fake_nvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        made = fake_nvml.FakeNvml(gpus or (), **library)
        around = CudaSurroundings(
            root=tmp_path, environ=environ or {}, torch=lambda: torch, nvml=lambda: made
        )
        machine.library = made
        return around

    machine = make
    return make
