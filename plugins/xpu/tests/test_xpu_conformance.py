"""The xpu platform is conformant with host memory in the place of its GPUs, one and two."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

SETTINGS = {"plugins.xpu.substitute": "host", "dtype": "float32"}
TWO = {**SETTINGS, "plugins.xpu.substitute_devices": 2, "tensor_parallel_size": 2}

TestPlugin = PluginSuite.of("xpu", settings=SETTINGS)
TestPlatform = pytest.mark.shared_workers(
    PlatformSuite.of("xpu", executor="uni", settings=SETTINGS)
)
TestWorker = WorkerSuite.of("xpu", executor="uni", settings=SETTINGS)
TestModelRunner = pytest.mark.shared_workers(
    ModelRunnerSuite.of("xpu", executor="uni", settings=SETTINGS)
)

TestWorkerOnMp = pytest.mark.slow(
    pytest.mark.shared_workers(WorkerSuite.of("xpu", executor="mp", settings=TWO))
)
