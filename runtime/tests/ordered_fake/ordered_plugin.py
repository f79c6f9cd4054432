"""A pytest plugin: runners are tested on the device that enforces order (``-p ordered_plugin``).

``--staged-copies PATH`` runs another text of ``hardpoint_runtime.staged_copies``: a mutated one
must be found out. ``--device-class``, ``--worker-class``, ``--runner-class`` and
``--platform-class`` name others than the toolkit's for accelerators, as ``module:Class``: those of
a platform, tried on this device.
"""

from __future__ import annotations

import importlib.util
import sys

import ordered_device
import ordered_memory
import pytest


def pytest_addoption(parser):
    parser.addoption("--staged-copies", help="a file to use as hardpoint_runtime.staged_copies")
    package = "hardpoint_runtime.accelerator"
    parser.addoption("--device-class", default=f"{package}.device:AcceleratorDeviceOps")
    parser.addoption("--worker-class", default=f"{package}.worker:AcceleratorWorker")
    parser.addoption("--platform-class", help="what the worker asks beside the test's platform")
    parser.addoption("--runner-class", default=f"{package}.model_runner:AcceleratorModelRunner")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before any conftest imports the runtime."""
    if path := early_config.known_args_namespace.staged_copies:
        name = "hardpoint_runtime.staged_copies"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    ordered_device.install()
    from hardpoint.references import resolve

    options = early_config.known_args_namespace
    named = options.platform_class
    globals()["platform_class"] = resolve(named) if named else None
    globals()["worker_class"] = resolve(options.worker_class)
    globals()["runner_class"] = resolve(options.runner_class)
    globals()["runner_reference"] = options.runner_class

    class OrderedDeviceOps(resolve(options.device_class)):
        """The port, as it is, over the device that enforces order: its graphs, and pools over its
        virtual memory.
        """

        graph_class = "Graph"

        def __init__(self):
            super().__init__(ordered_device.NAME, 0, pins=True)

        def make_pools(self):
            memory, buffer = ordered_memory.OrderedVirtualMemory(), self.host_buffer
            return ordered_device.OrderedPools(
                memory, self.device, buffer, synchronize=self.synchronize,
                give_back=self.empty_cache,
            )  # fmt: skip

        def host_buffer(self, shape, dtype):
            return ordered_device.PinnedTensor.new(shape, dtype)

    globals()["DeviceOps"] = OrderedDeviceOps


@pytest.fixture(autouse=True)
def everything_arrives():
    """Start each test on a device as new; what is on its way at its end must still be right."""
    ordered_device.DEVICE.begin()
    yield ordered_device.DEVICE
    ordered_device.DEVICE.synchronize()


@pytest.fixture
def device():
    return globals()["DeviceOps"]()
