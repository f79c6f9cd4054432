"""The device port on host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.device import DeviceOps, HostDeviceOps, TorchDeviceOps


@pytest.fixture
def device():
    return HostDeviceOps()


@pytest.mark.parametrize(
    "values", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.int32), torch.tensor([1, 2, 3])]
)
def test_values_are_copied_to_the_device(device, values):
    moved = device.to_device(values, torch.int64)
    assert moved.tolist() == [1, 2, 3]
    assert moved.dtype == torch.int64
    if not isinstance(values, list | tuple):
        values[0] = 99
        assert moved.tolist() == [1, 2, 3]


def test_host_memory_is_zero_and_untouched_until_used(device):
    before = _resident()
    buffer = device.allocate(256 << 20, "kv_cache")
    assert _resident() - before < 64 << 20
    assert buffer.dtype == torch.uint8
    assert int(buffer[:: 1 << 20].sum()) == 0


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_inference_needs_no_gradients(device):
    weight = torch.ones(2, requires_grad=True)
    with device.inference():
        assert not (weight * 2).requires_grad


def test_seeding_repeats_the_devices_draws(device):
    state = torch.get_rng_state()
    device.seed(5)
    first = torch.rand(3)
    device.seed(5)
    assert torch.equal(torch.rand(3), first)
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.memory_info(),
        lambda d: d.memory_allocated(),
        lambda d: d.compile(abs, []),
    ],
)
def test_what_the_device_cannot_do_is_a_named_error(device, call):
    with pytest.raises(UnsupportedError, match="device cpu does not support"):
        call(device)


def test_host_work_is_done_when_the_call_returns(device):
    device.set_device()
    device.synchronize()
    tensor = torch.ones(2)
    assert device.to_host(tensor) is tensor
    assert device.buckets(100) == ()
    assert device.host_buffer((2, 3), torch.int32).shape == (2, 3)


def test_the_port_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        DeviceOps()


def test_a_device_that_torch_does_not_know_is_an_error():
    with pytest.raises(RuntimeError, match="acmedevice"):
        TorchDeviceOps("acmedevice")
