"""The rocm platform is conformant with host memory in the place of its GPUs."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

SETTINGS = {"plugins.rocm.substitute": "host", "dtype": "float32"}

TestPlugin = PluginSuite.of("rocm", settings=SETTINGS)
TestPlatform = pytest.mark.shared_workers(
    PlatformSuite.of("rocm", executor="uni", settings=SETTINGS)
)
TestWorker = pytest.mark.shared_workers(WorkerSuite.of("rocm", executor="uni", settings=SETTINGS))
TestModelRunner = pytest.mark.shared_workers(
    ModelRunnerSuite.of("rocm", executor="uni", settings=SETTINGS)
)
