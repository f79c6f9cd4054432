"""A folder that stands for the kernel's files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

MODELS = importlib.util.spec_from_file_location(
    "native_models", Path(__file__).with_name("native_models.py")
)
native_models = importlib.util.module_from_spec(MODELS)
sys.modules[MODELS.name] = native_models  # tests import it by this name
MODELS.loader.exec_module(native_models)

MEMINFO = "MemTotal: 16777216 kB\nMemFree: 100 kB\nMemAvailable: 12582912 kB\n"


@pytest.fixture
def kernel(tmp_path) -> Callable[..., Path]:
    """Write files (path -> text) below a root and return it; 16 GiB of memory, 12 available."""

    def make(files: dict[str, str] | None = None, *, groups: str = "", mounts: str = "") -> Path:
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": groups,
            "proc/self/mountinfo": mounts,
            **(files or {}),
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


V2 = {
    "groups": "0::/user/job\n",
    "mounts": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
}
V1 = {
    "groups": "4:memory:/user/job\n3:cpu,cpuacct:/user/job\n",
    "mounts": (
        "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    ),
}


@pytest.fixture
def v1(kernel):
    """As ``kernel``, with control groups of version 1."""
    return lambda files: kernel(files, **V1)


@pytest.fixture
def v2(kernel):
    """As ``kernel``, with control groups of version 2."""
    return lambda files: kernel(files, **V2)


def unchanged(model) -> None:
    """Leave a model as it is."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return the folder of a tiny model of a family (``native_models.FAMILIES``), maybe changed;
    each is written once.
    """
    made = {}

    def make(name: str, dtype: torch.dtype = torch.float32, change=unchanged) -> Path:
        if (name, dtype, change) not in made:
            folder = made[name, dtype, change] = tmp_path_factory.mktemp(name)
            native_models.write(folder, name, dtype, change)
        return made[name, dtype, change]

    return make


def pytest_collection_modifyitems(items):
    """Leave the real checkpoint to the slow lane: the tests of parity have it, too."""
    for item in items:
        if item.name.startswith("test_the_default_model"):
            item.add_marker(pytest.mark.slow)
