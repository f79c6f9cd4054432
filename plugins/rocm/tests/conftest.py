"""A made-up management library, and machines that have it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_amdsmi
from hardpoint_rocm.detection import RocmSurroundings

BUILT = {"__version__": "2.13.0", "cuda": None, "hip": "7.1.0"}


@pytest.fixture
def machine(tmp_path):
    """Return what detection sees of a machine: its GPUs (None: no library), variables, files."""

    def make(gpus=None, *, environ=None, torch=BUILT, files=(), absent=KeyError, **library):
        needed = {"dev/kfd": ""} if gpus is not None or library else {}
        for name, text in {**needed, **dict(files)}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made = fake_amdsmi.FakeSmi(gpus or (), **library)

        def load():
            if gpus is None and not library:
                print("libamd_smi.so: cannot open shared object file")  # as the real one does
                raise absent("libamd_smi.so")
            return made

        return RocmSurroundings(root=tmp_path, environ=environ or {}, torch=lambda: torch, smi=load)

    return make
