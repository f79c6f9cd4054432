"""The conformance kit: five suites that certify a platform or an executor; each takes one line.

``TestPlatform = PlatformSuite.of("acme")`` in a test module is all that an author writes. Each name
is imported when it is asked for: as a pytest plugin the kit is in every test run beside it, and
shall cost those nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint_conformance.executor_suite import ExecutorSuite
    from hardpoint_conformance.model_runner_suite import ModelRunnerSuite
    from hardpoint_conformance.oracle import Oracle
    from hardpoint_conformance.platform_suite import PlatformSuite
    from hardpoint_conformance.plugin_suite import PluginSuite
    from hardpoint_conformance.probe import Probe
    from hardpoint_conformance.worker_suite import WorkerSuite

__all__ = [
    "ExecutorSuite", "ModelRunnerSuite", "Oracle", "PlatformSuite", "PluginSuite", "Probe",
    "WorkerSuite",
]  # fmt: skip

_HOMES = {
    "ExecutorSuite": "executor_suite",
    "ModelRunnerSuite": "model_runner_suite",
    "Oracle": "oracle",
    "PlatformSuite": "platform_suite",
    "PluginSuite": "plugin_suite",
    "Probe": "probe",
    "WorkerSuite": "worker_suite",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
