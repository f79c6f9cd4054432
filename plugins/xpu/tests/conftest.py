"""Machines with Intel GPUs, made up of files."""

from __future__ import annotations

import pytest
from hardpoint_runtime.accelerator.surroundings import Surroundings

BUILT = {"__version__": "2.13.0+xpu", "cuda": None, "xpu": "20250301"}


@pytest.fixture
def machine(tmp_path):
    """Return what detection sees of a machine: PCI device numbers of its GPUs, and variables."""

    def make(
        cards=(), *, environ=None, torch=BUILT, tiles=1, vendor="0x8086", files=()
    ) -> Surroundings:
        made = dict(files)
        for place, number in enumerate(cards):
            node = f"sys/class/drm/renderD{128 + place}"
            made |= {
                f"{node}/device/vendor": f"{vendor}\n",
                f"{node}/device/device": f"{number}\n",
                f"dev/dri/renderD{128 + place}": "",
            }
            for tile in range(tiles if tiles > 1 else 0):
                made[f"{node}/device/tile{tile}/physical_vram_size_bytes"] = f"{64 << 30:#x}\n"
            if tiles == 1:
                made[f"{node}/device/drm/card{place}/lmem_total_bytes"] = f"{16 << 30}\n"
        for name, text in made.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Surroundings(root=tmp_path, environ=environ or {}, torch=lambda: torch)

    return make
