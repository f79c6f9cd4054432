"""While weights load, large blocks of the heap are given back when they are freed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys

import pytest
from hardpoint_cpu import worker
from hardpoint_cpu.heap import OWN_SETTINGS
from hardpoint_runtime.worker import TorchWorker
from native_models import engine

MANY = 40
MEASURE = """
import ctypes, json, sys
from hardpoint_cpu.heap import large_blocks_mapped
names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
         "fordblks", "keepcost")
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in names]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def mapped():
    before = libc.mallinfo2().hblks
    blocks = [libc.malloc(1 << 20) for _ in range(40)]
    found = libc.mallinfo2().hblks - before
    for block in blocks:
        libc.free(block)
    return found
found = []
with large_blocks_mapped(json.loads(sys.argv[1])):
    found.append(mapped())
    with large_blocks_mapped({}):
        pass
    found.append(mapped())
found.append(mapped())
try:
    with large_blocks_mapped({}):
        raise OSError
except OSError:
    found.append(mapped())
print(json.dumps(found))
"""


def measured(environ):
    """Of many blocks of 1 MiB, how many are mapped for themselves: within twice, and after that. In
    a process of its own, whose heap is small.
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("not glibc 2.33 or later")
    command = [sys.executable, "-c", MEASURE, json.dumps(environ)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def test_large_blocks_are_mapped_until_the_last_load_has_ended():
    within, again, after, failed = measured({})
    assert within == again == MANY  # the second time also after some were freed
    assert after == failed == 0


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_a_heap_that_a_variable_sets_is_left_alone(name):
    assert measured({name: "1"})[1] == 0  # glibc's own raising, or that of a load before


def test_weights_are_loaded_so(checkpoint, monkeypatch):
    said = []

    @contextlib.contextmanager
    def noted():
        said.append("begin")
        yield
        said.append("end")

    load = TorchWorker.load_model
    monkeypatch.setattr(worker, "large_blocks_mapped", noted)
    monkeypatch.setattr(TorchWorker, "load_model", lambda self: said.append("load") or load(self))
    with engine(checkpoint("llama"), "auto"):
        assert said == ["begin", "load", "end"]
