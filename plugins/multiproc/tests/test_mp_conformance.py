"""The ``mp`` executor is conformant."""

from hardpoint_conformance import ExecutorSuite, PluginSuite

TestPlugin = PluginSuite.of("mp")
TestExecutor = ExecutorSuite.of("mp")
