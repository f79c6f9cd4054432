"""How the benchmarks start engines: the dummy platform, with an extension for the time being."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hardpoint.config.loading import load_config

from hardpoint_engine.build import start_engine
from hardpoint_engine.core import EngineCore

NAME = "bench"
"""The extension."""
METHOD = "bench_receive"
WORK = "bench_work"
PROCESS = "bench_process_id"
"""Its worker methods."""


class Installed:
    """Makes the extension one that is found, in this process and its workers, by metadata in a
    folder of its own; nothing is installed beyond that. Closed, it is found no more.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hardpoint-bench-")
        info = Path(self._folder.name) / "hardpoint_bench_methods-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: hardpoint-bench-methods\nVersion: 1\n"
        )
        (info / "entry_points.txt").write_text(
            f"[hardpoint.extensions]\n{NAME} = hardpoint_engine.bench.extension\n"
        )
        sys.path.append(self._folder.name)

    def close(self) -> None:
        """Remove it."""
        sys.path.remove(self._folder.name)
        self._folder.cleanup()


def start_dummy(workers: int) -> EngineCore:
    """Start an engine of ``mp`` with so many workers on the dummy platform."""
    keys = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": "mp",
        "plugins.dummy.num_workers": workers,
    }
    return start_engine(load_config(overrides=keys, environ={}))
