"""The cpu platform is conformant, on both executors."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

TestPlugin = PluginSuite.of("cpu")
TestPlatform = PlatformSuite.of("cpu", executor="uni")
TestWorker = WorkerSuite.of("cpu", executor="uni")
TestModelRunner = ModelRunnerSuite.of("cpu", executor="uni")

TestPlatformOnMp = pytest.mark.slow(PlatformSuite.of("cpu", executor="mp"))
TestWorkerOnMp = pytest.mark.slow(WorkerSuite.of("cpu", executor="mp"))
TestModelRunnerOnMp = ModelRunnerSuite.of("cpu", executor="mp")
