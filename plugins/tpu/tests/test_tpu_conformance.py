"""The tpu platform is conformant with XLA on the CPU, on both executors."""

from __future__ import annotations

import tempfile

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

PROGRAMS = tempfile.TemporaryDirectory(prefix="tpu-conformance-")
"""Compiled programs: most starts have the same shapes. Removed when the interpreter ends."""
SETTINGS = {
    "plugins.tpu.backend": "cpu",
    "plugins.tpu.request_buckets": (4, 16),
    "plugins.tpu.token_buckets": (16, 64),
    "plugins.tpu.compilation_cache": PROGRAMS.name,
}

TestPlugin = PluginSuite.of("tpu", settings=SETTINGS)
TestModelRunner = ModelRunnerSuite.of("tpu", executor="uni", settings=SETTINGS)

TestPlatform = pytest.mark.shared_workers(
    PlatformSuite.of("tpu", executor="uni", settings=SETTINGS)
)
TestWorker = pytest.mark.shared_workers(WorkerSuite.of("tpu", executor="uni", settings=SETTINGS))
TestWorkerOnMp = pytest.mark.shared_workers(WorkerSuite.of("tpu", executor="mp", settings=SETTINGS))
TestPlatformOnMp = pytest.mark.shared_workers(
    PlatformSuite.of("tpu", executor="mp", settings=SETTINGS)
)
TestModelRunnerOnMp = pytest.mark.shared_workers(
    ModelRunnerSuite.of("tpu", executor="mp", settings=SETTINGS)
)
