"""The ports to the drivers' virtual memory, against one in C that refuses what real ones do."""

from __future__ import annotations

import _ctypes
import ctypes
import itertools
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hardpoint.references import resolve
from hardpoint_runtime.accelerator.driver_memory import loaded
from hardpoint_runtime.accelerator.pools import AddressKeepingPools

SOURCE = Path(__file__).with_name("fake_driver.c")
MIB = 1 << 20
COPIES = itertools.count()
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
KINDS = {"cuda": (), "rocm": ("-DHIP",)}
NAMES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so.7.1"}
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="there is no compiler for the made-up driver"
)


def port_of(name):
    return resolve(f"hardpoint_{name}.virtual_memory:{name.capitalize()}VirtualMemory")


@pytest.fixture(scope="module", params=KINDS)
def compiled(request, tmp_path_factory):
    """Return (platform, the driver's library)."""
    path = tmp_path_factory.mktemp("driver") / NAMES[request.param]
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *KINDS[request.param],
         "-o", path, SOURCE],
        check=True,
    )  # fmt: skip
    return request.param, path


@pytest.fixture
def memory(compiled, tmp_path):
    """A port to a driver of its own: as many libraries, as many states. ``asked`` are the calls."""
    name, library = compiled
    own = tmp_path / f"libfake{next(COPIES)}.so"
    shutil.copy(library, own)

    class Fake(port_of(name)):
        def load(self):
            return ctypes.CDLL(str(own))

        def _call(self, what, *arguments):
            self.__dict__.setdefault("asked", []).append(what)
            super()._call(what, *arguments)

    made = Fake(0)
    made._library.fake_limit.argtypes = (ctypes.c_size_t,)
    made._library.fake_held.restype = ctypes.c_size_t
    made.asked.clear()
    return made


def filled(num_bytes):
    return torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)


@needs_compiler
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
    with pytest.raises(OSError, match=rf"{memory.functions['to_host']}: not mapped"):
        memory.read(address, seen)
    memory.map(address, 4 * MIB)
    memory.read(address, seen)
    assert not seen.any()
    memory.unmap(address, 4 * MIB)
    memory.release(address, 4 * MIB)
    assert memory._library.fake_left() == 0


@needs_compiler
def test_the_driver_is_asked_in_its_order(memory):
    address = memory.reserve(2 * MIB)
    memory.map(address, 2 * MIB)
    memory.unmap(address, 2 * MIB)
    memory.release(address, 2 * MIB)
    assert memory.asked == ["reserve", "create", "map", "access", "unmap", "destroy", "free"]


@needs_compiler
def test_no_memory_left_is_out_of_memory_and_leaves_nothing(memory):
    memory._library.fake_limit(3 * MIB)
    address = memory.reserve(4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=rf"{memory.functions['create']}: out of mem"):
        memory.map(address, 4 * MIB)
    memory.release(address, 4 * MIB)
    assert memory.asked == ["reserve", "create", "free"]
    assert memory._library.fake_left() == 0


@needs_compiler
@pytest.mark.parametrize(
    ("failing", "undone"), [("map", ["destroy"]), ("access", ["unmap", "destroy"])]
)
def test_what_fails_half_way_is_undone_and_leaves_nothing(memory, failing, undone, monkeypatch):
    address = memory.reserve(2 * MIB)
    with monkeypatch.context() as patch:
        patch.setitem(memory._calls, failing, lambda *arguments: 1)
        with pytest.raises(OSError, match=rf"{memory.functions[failing]}: invalid value"):
            memory.map(address, 2 * MIB)
    assert memory.asked[memory.asked.index(failing) + 1 :] == undone
    memory.map(address, 2 * MIB)
    memory.unmap(address, 2 * MIB)
    memory.release(address, 2 * MIB)
    assert memory._library.fake_left() == 0


@needs_compiler
def test_what_the_driver_refuses_says_what_and_why(memory):
    with pytest.raises(OSError, match=rf"{memory.functions['reserve']}: invalid value"):
        memory.reserve(MIB)
    with pytest.raises(OSError, match=rf"{memory.functions['free']}: invalid value"):
        memory.release(4096, 2 * MIB)
    address = memory.reserve(2 * MIB)
    memory.map(address, 2 * MIB)
    with pytest.raises(OSError, match=rf"{memory.functions['free']}: invalid value"):
        memory.release(address, 2 * MIB)  # memory is behind it
    with pytest.raises(OSError, match=rf"{memory.functions['map']}: invalid value"):
        memory.map(address, 2 * MIB)  # twice
    memory.unmap(address, 2 * MIB)
    memory.release(address, 2 * MIB)
    assert memory._library.fake_left() == 0


@needs_compiler
def test_threads_that_never_had_the_device_get_it(memory):
    """torch gives memory back on whatever thread lets go of it last."""
    address = memory.reserve(2 * MIB)
    memory.map(address, 2 * MIB)
    memory.write(address, filled(2 * MIB))
    seen = torch.empty(2 * MIB, dtype=torch.uint8)
    for call in (
        lambda: memory.read(address, seen),
        lambda: memory.unmap(address, 2 * MIB),
        lambda: memory.release(address, 2 * MIB),
    ):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(call).result(60)
    assert torch.equal(seen, filled(2 * MIB))
    assert memory._library.fake_left() == 0


@needs_compiler
def test_pools_sleep_on_it_and_keep_their_addresses(memory):
    def host_buffer(shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    pools = AddressKeepingPools(memory, host_buffer, lambda: None, lambda: None)
    weights = pools.allocate("weights", 3 * MIB)
    cache = pools.allocate("kv_cache", MIB)
    memory.write(weights, filled(3 * MIB))
    memory.asked.clear()
    report = pools.sleep(("weights", "kv_cache"), keep=("weights",))
    assert memory.asked == ["to_host", *("unmap", "destroy") * 2]
    assert (report.bytes_freed, report.bytes_backed_up) == (6 * MIB, 4 * MIB)
    assert memory._library.fake_held() == 0
    memory.asked.clear()
    pools.wake(("weights", "kv_cache"))
    assert memory.asked == ["create", "map", "access", "to_device", "create", "map", "access"]
    seen = torch.empty(3 * MIB, dtype=torch.uint8)
    memory.read(weights, seen)
    assert torch.equal(seen, filled(3 * MIB))
    for address in (weights, cache):
        pools.free(address)
    assert memory._library.fake_left() == 0


@needs_compiler
def test_waking_goes_on_where_the_device_had_no_memory(memory):
    pools = AddressKeepingPools(
        memory,
        lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype),
        lambda: None,
        lambda: None,
    )
    places = [pools.allocate("weights", 2 * MIB) for _ in range(2)]
    for place, value in zip(places, (3, 4), strict=True):
        memory.write(place, torch.full((2 * MIB,), value, dtype=torch.uint8))
    pools.sleep(("weights",), keep=("weights",))
    memory._library.fake_limit(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        pools.wake(("weights",))
    assert memory._library.fake_held() == 2 * MIB
    memory._library.fake_limit(4 * MIB)
    pools.wake(("weights",))
    for place, value in zip(places, (3, 4), strict=True):
        seen = torch.empty(2 * MIB, dtype=torch.uint8)
        memory.read(place, seen)
        assert (seen == value).all()
        pools.free(place)
    assert memory._library.fake_left() == 0


@needs_compiler
def test_the_copy_is_used_that_torch_has_loaded(compiled):
    """Another copy would be another runtime, which knows nothing of torch's device."""
    name, library = compiled
    port = port_of(name)
    torchs = ctypes.CDLL(str(library))
    handles = [torchs._handle]
    try:
        found = port(0)
        handles.append(found._library._handle)
        assert found._library._name == str(library)
        address = found.reserve(2 * MIB)
        assert torchs.fake_left() == 1
        found.release(address, 2 * MIB)
    finally:
        for handle in handles:
            _ctypes.dlclose(handle)
    assert loaded(port.library_name) is None


@pytest.mark.parametrize(("name", "library"), [("cuda", "libcuda"), ("rocm", "libamdhip64")])
@pytest.mark.skipif(any(map(Path.exists, map(Path, DEVICE_FILES))), reason="there is a driver here")
def test_without_the_driver_it_says_so(name, library, monkeypatch):
    monkeypatch.setattr("hardpoint_runtime.accelerator.driver_memory.loaded", lambda name: None)
    with pytest.raises(OSError, match=library):
        port_of(name)(0)
