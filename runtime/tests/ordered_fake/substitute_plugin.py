"""A pytest plugin: runners are tested on host memory that stands for an accelerator, with the
classes of a platform (``-p substitute_plugin --device-class module:Class ...``).
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    package = "hardpoint_runtime.accelerator"
    parser.addoption("--device-class", default=f"{package}.substitute:SubstituteDeviceOps")
    parser.addoption("--worker-class", default=f"{package}.worker:AcceleratorWorker")
    parser.addoption("--platform-class", help="what the worker asks beside the test's platform")
    parser.addoption("--runner-class", default=f"{package}.model_runner:AcceleratorModelRunner")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    from hardpoint.references import resolve

    options = early_config.known_args_namespace

    class OneDevice(resolve(options.device_class)):
        def __init__(self):
            super().__init__(1, 64 << 30)

    globals()["DeviceOps"] = OneDevice
    named = options.platform_class
    globals()["platform_class"] = resolve(named) if named else None
    globals()["worker_class"] = resolve(options.worker_class)
    globals()["runner_class"] = resolve(options.runner_class)
    globals()["runner_reference"] = options.runner_class
