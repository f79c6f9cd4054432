"""The dummy platform and the uni executor are conformant."""

from hardpoint_conformance import ModelRunnerSuite, PluginSuite

TestPlugin = PluginSuite.of("dummy")
TestModelRunner = ModelRunnerSuite.of("dummy")
