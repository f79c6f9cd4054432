"""The ``ray`` executor is conformant: the kit over actors of one node."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ExecutorSuite, PluginSuite

TestPlugin = PluginSuite.of("ray")
TestExecutor = pytest.mark.usefixtures("session")(pytest.mark.slow(ExecutorSuite.of("ray")))
