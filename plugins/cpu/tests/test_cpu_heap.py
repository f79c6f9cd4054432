"""While weights load, large blocks of the heap are given back when they are freed."""

from __future__ import annotations

import ctypes

import pytest
from hardpoint_cpu.heap import OWN_SETTINGS, large_blocks_mapped
from hardpoint_cpu.worker import CpuWorker
from native_models import engine

MANY, BYTES = 40, 1 << 20
libc = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(libc, "mallinfo2"), reason="not glibc 2.33 or later")


class Info(ctypes.Structure):
    """``struct mallinfo2``: ``hblks`` is how many blocks are mapped for themselves."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


libc.mallinfo2 = getattr(libc, "mallinfo2", libc.malloc)
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]


def mapped():
    """Of many blocks of 1 MiB, how many are mapped for themselves now."""
    before = libc.mallinfo2().hblks
    blocks = [libc.malloc(BYTES) for _ in range(MANY)]
    found = libc.mallinfo2().hblks - before
    for block in blocks:
        libc.free(block)
    return found


def test_large_blocks_are_mapped_until_the_last_load_has_ended():
    with large_blocks_mapped({}):
        assert mapped() >= MANY - 4
        with large_blocks_mapped({}):
            pass
        assert mapped() >= MANY - 4  # also after some were freed
    assert mapped() <= 4
    with pytest.raises(OSError, match="cut short"), large_blocks_mapped({}):
        raise OSError("cut short")
    assert mapped() <= 4


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_a_heap_that_a_variable_sets_is_left_alone(name):
    with large_blocks_mapped({}):
        pass
    with large_blocks_mapped({name: "1"}):
        assert mapped() <= 4


def test_weights_are_loaded_so(checkpoint, monkeypatch):
    found = []
    load = CpuWorker.load_model.__globals__["TorchWorker"].load_model
    monkeypatch.setattr(
        "hardpoint_runtime.worker.TorchWorker.load_model",
        lambda self: found.append(mapped()) or load(self),
    )
    with engine(checkpoint("llama"), "auto"):
        assert mapped() <= 4
    assert found[0] >= MANY - 4
