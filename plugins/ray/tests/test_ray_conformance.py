"""The ``ray`` executor is conformant: the kit over actors of one node."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ExecutorSuite, PluginSuite

pytestmark = pytest.mark.usefixtures("session")

TestPlugin = PluginSuite.of("ray")
TestExecutor = pytest.mark.slow(ExecutorSuite.of("ray"))
