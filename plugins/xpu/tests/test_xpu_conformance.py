"""The xpu platform is conformant with host memory in the place of its GPUs."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

SETTINGS = {"plugins.xpu.substitute": "host", "dtype": "float32"}

TestPlugin = PluginSuite.of("xpu", settings=SETTINGS)
TestPlatform = pytest.mark.shared_workers(
    PlatformSuite.of("xpu", executor="uni", settings=SETTINGS)
)
TestWorker = WorkerSuite.of("xpu", executor="uni", settings=SETTINGS)
TestModelRunner = pytest.mark.shared_workers(
    ModelRunnerSuite.of("xpu", executor="uni", settings=SETTINGS)
)
