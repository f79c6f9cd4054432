"""The platform keeps the contracts: a line for each. Run it with ``pytest``, or certify with
``hardpoint conformance acme``.
"""

from hardpoint_conformance import ModelRunnerSuite, PlatformSuite, PluginSuite, WorkerSuite

TestPlugin = PluginSuite.of("acme")
TestPlatform = PlatformSuite.of("acme")
TestWorker = WorkerSuite.of("acme")
TestModelRunner = ModelRunnerSuite.of("acme")
