"""The cpu platform is conformant, on both executors."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

TestPlugin = PluginSuite.of("cpu")
TestPlatform = PlatformSuite.of("cpu", executor="uni")
TestWorker = WorkerSuite.of("cpu", executor="uni")
TestModelRunner = ModelRunnerSuite.of("cpu", executor="uni")

TestPlatformOnMp = pytest.mark.shared_workers(PlatformSuite.of("cpu", executor="mp"))
TestWorkerOnMp = pytest.mark.shared_workers(WorkerSuite.of("cpu", executor="mp"))
TestModelRunnerOnMp = ModelRunnerSuite.of("cpu", executor="mp")
