"""``DeviceOps.compile`` over torch.compile, with a backend that needs no compiler of the system."""

from __future__ import annotations

import pytest
import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.graphs.compiled import CompiledShapes


def scaled(x, weight):
    return (x * weight).sum(-1) + 1


class Compiling(HostDeviceOps):
    compiler = "eager"


def test_each_shape_is_compiled_once_and_others_run_as_they_are():
    calls = []

    def compiled(x, weight):
        calls.append(x.shape[0])
        return scaled(x, weight)

    function = CompiledShapes(scaled, compiled, [{"x": 4}, {"x": 8}])
    weight = torch.arange(3.0)
    for size in (4, 8, 5, 4):
        x = torch.randn(size, 3)
        assert torch.equal(function(x, weight=weight), scaled(x, weight))
    assert calls == [4, 8, 4]
    assert function.missed == 1


@pytest.mark.slow  # torch imports its compiler for seconds
def test_a_device_with_a_compiler_compiles():
    function = Compiling().compile(scaled, [{"x": 4}])
    x, weight = torch.randn(4, 3), torch.arange(3.0)
    with torch.inference_mode():
        assert torch.equal(function(x, weight), scaled(x, weight))
        assert torch.equal(function(x[:2], weight), scaled(x[:2], weight))
    assert function.missed == 1


def test_a_device_without_one_says_so():
    with pytest.raises(UnsupportedError, match="device cpu does not support compiling"):
        HostDeviceOps().compile(scaled, [{"x": 4}])


def test_an_argument_that_is_left_out_has_no_shape_and_an_unknown_one_is_refused():
    def function(x, y=None):
        return x

    both = CompiledShapes(function, lambda x, y=None: x + 1, [{"x": 2, "y": 3}])
    assert both(torch.zeros(2)).tolist() == [0, 0]
    assert both(torch.zeros(2), torch.zeros(())).tolist() == [0, 0]
    assert both(torch.zeros(2), y=torch.zeros(3)).tolist() == [1, 1]
    assert both.missed == 2
    with pytest.raises(ValueError, match="has no parameter 'z' to be compiled for"):
        CompiledShapes(function, function, [{"z": 3}])
