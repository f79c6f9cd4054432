"""The port to the driver's virtual memory, against one in C that refuses what a real one does."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hardpoint_cuda.virtual_memory import CudaVirtualMemory
from hardpoint_runtime.accelerator.pools import AddressKeepingPools

SOURCE = Path(__file__).with_name("fake_driver.c")
MIB = 1 << 20
COPIES = itertools.count()
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="there is no compiler for the made-up driver"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libfake.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def memory(compiled, tmp_path):
    """A port to a driver of its own: as many libraries, as many states."""
    own = tmp_path / f"libfake{next(COPIES)}.so"
    shutil.copy(compiled, own)

    class Fake(CudaVirtualMemory):
        def load(self):
            return ctypes.CDLL(str(own))

    made = Fake(0)
    made._library.fake_limit.argtypes = (ctypes.c_size_t,)
    made._library.fake_held.restype = ctypes.c_size_t
    return made


def filled(num_bytes):
    return torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)


def test_memory_comes_and_goes_behind_an_address(memory):
    assert memory.granularity == 2 * MIB
    address = memory.reserve(4 * MIB)
    memory.map(address, 4 * MIB)
    memory.write(address, filled(4 * MIB))
    assert memory._library.fake_held() == 4 * MIB
    seen = torch.empty(4 * MIB, dtype=torch.uint8)
    memory.read(address, seen)
    assert torch.equal(seen, filled(4 * MIB))
    memory.unmap(address, 4 * MIB)
    assert memory._library.fake_held() == 0
    with pytest.raises(OSError, match="cuMemcpyDtoH_v2: not mapped"):
        memory.read(address, seen)
    memory.map(address, 4 * MIB)
    memory.read(address, seen)
    assert not seen.any()
    memory.unmap(address, 4 * MIB)
    memory.release(address, 4 * MIB)
    assert memory._library.fake_left() == 0


def test_no_memory_left_is_out_of_memory_and_leaves_nothing(memory):
    memory._library.fake_limit(3 * MIB)
    address = memory.reserve(4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate: out of memory"):
        memory.map(address, 4 * MIB)
    memory.release(address, 4 * MIB)
    assert memory._library.fake_left() == 0


@pytest.mark.parametrize("failing", ["map", "access"])
def test_what_fails_half_way_leaves_nothing(memory, failing, monkeypatch):
    address = memory.reserve(2 * MIB)
    monkeypatch.setitem(memory._calls, failing, lambda *arguments: 1)
    with pytest.raises(OSError, match="invalid value"):
        memory.map(address, 2 * MIB)
    memory.release(address, 2 * MIB)
    assert memory._library.fake_left() == 0


def test_what_the_driver_refuses_says_what_and_why(memory):
    with pytest.raises(OSError, match="cuMemAddressReserve: invalid value"):
        memory.reserve(MIB)
    with pytest.raises(OSError, match="cuMemAddressFree: invalid value"):
        memory.release(4096, 2 * MIB)


def test_pools_sleep_on_it_and_keep_their_addresses(memory):
    def host_buffer(shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    pools = AddressKeepingPools(memory, host_buffer, lambda: None)
    weights = pools.allocate("weights", 3 * MIB)
    cache = pools.allocate("kv_cache", MIB)
    memory.write(weights, filled(3 * MIB))
    report = pools.sleep(("weights", "kv_cache"), keep=("weights",))
    assert (report.bytes_freed, report.bytes_backed_up) == (6 * MIB, 4 * MIB)
    assert memory._library.fake_held() == 0
    pools.wake(("weights", "kv_cache"))
    seen = torch.empty(3 * MIB, dtype=torch.uint8)
    memory.read(weights, seen)
    assert torch.equal(seen, filled(3 * MIB))
    for address in (weights, cache):
        pools.free(address)
    assert memory._library.fake_left() == 0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_without_the_driver_it_says_so():
    with pytest.raises(OSError, match="libcuda"):
        CudaVirtualMemory(0)
