"""GPUs as the system's files show them, where AMD SMI is not there: the compute driver's topology
(/sys/class/kfd), or, under WSL, only that there is one.
"""

from __future__ import annotations

import os

from attrs import frozen
from hardpoint_runtime.accelerator.surroundings import Surroundings

from hardpoint_rocm.amdsmi_port import Gpu
from hardpoint_rocm.gfx import name_of

NODES = "sys/class/kfd/kfd/topology/nodes"
KFD = "dev/kfd"
WSL = "dev/dxg"
WSL_LIBRARY = "usr/lib/wsl/lib/libdxcore.so"


@frozen(kw_only=True)
class Found:
    """GPUs in the driver's order, or the reasons why none is to be had."""

    gpus: tuple[Gpu, ...] = ()
    reasons: tuple[str, ...] = ()


def find_gpus(around: Surroundings) -> Found:
    """Look for the driver's files; opens no device. Under WSL the build of torch has to be
    believed: it is for HIP, and the Windows host lends its GPU.
    """
    if around.has(WSL):
        if not around.has(WSL_LIBRARY):
            return Found(reasons=(f"/dev/dxg is there (WSL), but /{WSL_LIBRARY} is not",))
        lent = Gpu(uuid="", name="GPU of the Windows host", memory_bytes=None, gfx=None)
        return Found(gpus=(lent,))
    if missing := closed(around):
        return Found(reasons=(missing,))
    folders = sorted((around.root / NODES).glob("*"), key=lambda path: int(path.name))
    gpus = tuple(gpu for folder in folders if (gpu := _node(around, f"{NODES}/{folder.name}")))
    return Found(gpus=gpus, reasons=() if gpus else (f"/{NODES} shows no GPU",))


def closed(around: Surroundings) -> str | None:
    """Return why this user cannot compute through the driver's device; None where nothing is known
    to be in the way. Management libraries answer without it.
    """
    if not around.has(KFD):
        return "no device file /dev/kfd is there"
    if not os.access(around.root / KFD, os.R_OK | os.W_OK):
        return (
            "/dev/kfd may not be opened by this user: it takes the groups render and video "
            "(usermod -aG render,video USER, and a new login)"
        )
    return None


def _node(around: Surroundings, path: str) -> Gpu | None:
    """Return the GPU of one node of the topology; None for a processor."""
    pairs = (line.partition(" ") for line in (around.read(f"{path}/properties") or "").splitlines())
    told = {name: int(value) for name, _, value in pairs if value.strip().isdecimal()}
    if not told.get("simd_count"):
        return None
    unique = told.get("unique_id", 0)
    return Gpu(
        uuid=f"{unique:016x}" if unique else "",
        name=around.read(f"{path}/name") or "AMD GPU",
        memory_bytes=_memory(around, path),
        gfx=name_of(told.get("gfx_target_version", 0)) if told.get("gfx_target_version") else None,
    )


def _memory(around: Surroundings, path: str) -> int | None:
    sizes = []
    for folder in sorted((around.root / path / "mem_banks").glob("*")):
        text = around.read(f"{path}/mem_banks/{folder.name}/properties") or ""
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "size_in_bytes" and value.isdecimal():
                sizes.append(int(value))
    return sum(sizes) or None
