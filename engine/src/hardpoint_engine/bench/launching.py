"""How the benchmarks start engines: the dummy platform, with an extension for the time being."""

from __future__ import annotations

from hardpoint.config.loading import load_config

from hardpoint_engine.build import start_engine
from hardpoint_engine.core import EngineCore
from hardpoint_engine.temporary_extension import TemporaryExtension

NAME = "bench"
"""The extension."""
METHOD = "bench_receive"
WORK = "bench_work"
PROCESS = "bench_process_id"
"""Its worker methods."""


class Installed(TemporaryExtension):
    """Makes the extension one that is found, until it is closed."""

    def __init__(self) -> None:
        super().__init__(NAME, "hardpoint_engine.bench.extension")


def start_dummy(workers: int, executor: str = "mp") -> EngineCore:
    """Start an engine with so many workers of ``executor`` on the dummy platform."""
    keys = {
        "model": "dummy",
        "load_format": "dummy",
        "platform": "dummy",
        "executor": executor,
        "plugins.dummy.num_workers": workers,
    }
    return start_engine(load_config(overrides=keys, environ={}))
