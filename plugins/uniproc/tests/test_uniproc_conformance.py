"""The ``uni`` executor is conformant."""

from hardpoint_conformance import ExecutorSuite, PluginSuite

TestPlugin = PluginSuite.of("uni")
TestExecutor = ExecutorSuite.of("uni")
