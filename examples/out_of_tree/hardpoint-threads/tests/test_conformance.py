"""The executor keeps the contracts: a line for each."""

from hardpoint_conformance import ExecutorSuite, PluginSuite

TestPlugin = PluginSuite.of("threads")
TestExecutor = ExecutorSuite.of("threads")
