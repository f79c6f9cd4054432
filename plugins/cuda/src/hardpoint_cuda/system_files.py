"""GPUs as the system's files show them, where NVML is not there: in containers that were given the
device files alone, under WSL, on Jetson boards.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen
from hardpoint_runtime.accelerator.surroundings import Surroundings

from hardpoint_cuda.nvml import Gpu

WSL_LIBRARY = "usr/lib/wsl/lib/libcuda.so.1"
TEGRA = "nvidia,tegra"


@frozen(kw_only=True)
class Found:
    """GPUs by the order of their files, or the reasons why none is to be had."""

    gpus: tuple[Gpu, ...] = ()
    reasons: tuple[str, ...] = ()


def find_gpus(around: Surroundings) -> Found:
    """Look for the driver's files; opens no device."""
    if around.has("dev/dxg"):
        if around.has(WSL_LIBRARY):
            return Found(gpus=(_nameless(0, "GPU of the Windows host"),))
        return Found(reasons=(f"/dev/dxg is there (WSL), but /{WSL_LIBRARY} is not",))
    board = around.read("proc/device-tree/compatible") or ""
    if TEGRA in board:
        name = (around.read("proc/device-tree/model") or "Jetson").strip("\0")
        return Found(gpus=(_nameless(0, name),))
    files = sorted((around.root / "dev").glob("nvidia[0-9]*"), key=_minor)
    if not files:
        return Found(reasons=("no device file /dev/nvidia* is there",))
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return Found(reasons=(f"{closed[0]} may not be opened by this user",))
    told = _told_by_the_driver(around)
    return Found(
        gpus=tuple(
            told.get(_minor(path)) or _nameless(n, "NVIDIA GPU") for n, path in enumerate(files)
        )
    )


def _told_by_the_driver(around: Surroundings) -> dict[int, Gpu]:
    """Return device minor -> GPU, of the folders that the kernel's driver shows."""
    found: dict[int, Gpu] = {}
    folders = sorted((around.root / "proc/driver/nvidia/gpus").glob("*"))
    for index, folder in enumerate(folders):
        text = around.read(str(folder.relative_to(around.root) / "information")) or ""
        pairs = (line.partition(":") for line in text.splitlines())
        told = {name.strip(): value.strip() for name, _, value in pairs}
        minor = told.get("Device Minor", "")
        if minor.isdecimal():
            found[int(minor)] = Gpu(
                index=index, uuid=told.get("GPU UUID", ""), name=told.get("Model", "NVIDIA GPU"),
                memory_bytes=None, capability=None,
            )  # fmt: skip
    return found


def _nameless(index: int, name: str) -> Gpu:
    return Gpu(index=index, uuid="", name=name, memory_bytes=None, capability=None)


def _minor(path: Path) -> int:
    return int(path.name.removeprefix("nvidia"))
