"""The rocm platform is conformant with host memory in the place of its GPUs, one and two."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

SETTINGS = {"plugins.rocm.substitute": "host", "dtype": "float32"}
TWO = {**SETTINGS, "plugins.rocm.substitute_devices": 2, "tensor_parallel_size": 2}

TestPlugin = PluginSuite.of("rocm", settings=SETTINGS)
TestPlatform = pytest.mark.shared_workers(
    PlatformSuite.of("rocm", executor="uni", settings=SETTINGS)
)
TestWorker = pytest.mark.shared_workers(WorkerSuite.of("rocm", executor="uni", settings=SETTINGS))
TestModelRunner = pytest.mark.shared_workers(
    ModelRunnerSuite.of("rocm", executor="uni", settings=SETTINGS)
)

TestWorkerOnMp = pytest.mark.slow(
    pytest.mark.shared_workers(WorkerSuite.of("rocm", executor="mp", settings=TWO))
)
