"""The dummy platform is conformant, on both executors."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

TestPlugin = PluginSuite.of("dummy")
TestPlatform = PlatformSuite.of("dummy")
TestWorker = WorkerSuite.of("dummy")
TestModelRunner = ModelRunnerSuite.of("dummy")

TestPlatformOnMp = pytest.mark.shared_workers(PlatformSuite.of("dummy", executor="mp"))
TestWorkerOnMp = pytest.mark.shared_workers(WorkerSuite.of("dummy", executor="mp"))
TestModelRunnerOnMp = ModelRunnerSuite.of("dummy", executor="mp")
