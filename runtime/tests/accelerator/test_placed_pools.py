"""Pools that tensors are placed in, over pages of the host: really taken away and brought back."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.placed_pools import PlacedPools, held_by_all

MIB = 1 << 20


def pools_over(memory, synchronize=lambda: None, give_back=lambda: None):
    return PlacedPools(
        memory, torch.device("cpu"), lambda shape, dtype: torch.empty(shape, dtype=dtype),
        synchronize=synchronize, give_back=give_back,
    )  # fmt: skip


@pytest.fixture
def pools():
    return pools_over(HostVirtualMemory())


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_made_in_a_pool_has_its_memory_and_nothing_else_does(pools):
    with pools.use("weights"):
        made = [
            torch.empty(3, 5), torch.zeros(4), torch.empty_strided((2, 2), (1, 2)),
            torch.nn.Parameter(torch.empty(6)), torch.zeros(2, dtype=torch.int64, device="cpu"),
        ]  # fmt: skip
        nothing, result = torch.empty(0), made[1] + 1
        made.append(torch.zeros_like(made[0]))
    outside = torch.empty(3)
    page = pools.memory.granularity
    assert pools.held(["weights"]) == page  # they share it
    places = [each.data_ptr() for each in made]
    assert {place % 512 for place in places} == {0}
    assert len(set(places)) == len(made)
    assert {place // page for place in places} == {places[0] // page}
    assert not made[1].any()
    assert [each.untyped_storage().nbytes() for each in made] == [60, 16, 16, 24, 16, 60]
    assert made[2].stride() == (1, 2)
    del made[1:]
    gc.collect()
    assert pools.held() == page
    del nothing, result, outside, made
    gc.collect()
    assert pools.held() == 0
    assert pools.memory.mapped == 0


def test_what_is_made_elsewhere_stays_there(pools):
    """As of a model that is tried on ``meta`` while it is built."""
    with pools.use("weights"):
        far = torch.empty(3, device="meta")
        made = [
            torch.empty_like(far), torch.zeros_like(far), far.new_empty(2), far.new_zeros(2),
            torch.empty(4, device="meta"),
        ]  # fmt: skip
        near = torch.empty_like(far, device="cpu")
        with torch.device("meta"):
            made.append(torch.zeros(2))
    assert {each.device.type for each in made} == {"meta"}
    assert near.device.type == "cpu"
    assert pools.held() == pools.memory.granularity


def test_memory_is_really_given_back_and_contents_come_back_at_their_addresses(pools):
    num_bytes = 48 * MIB
    with pools.use("weights"):
        weights = torch.empty(num_bytes // 4)
    weights.copy_(torch.arange(num_bytes // 4, dtype=torch.float32))
    view, place, before = weights[1000:1010], weights.data_ptr(), resident()
    report = pools.sleep(("weights",))
    assert report.bytes_freed == num_bytes
    assert before - resident() >= 0.8 * num_bytes
    pools.wake(("weights",))
    assert not weights[:10].any()
    weights.copy_(torch.arange(num_bytes // 4, dtype=torch.float32))
    report = pools.sleep(("weights",), keep=("weights",))
    assert report.bytes_backed_up == num_bytes
    report = pools.wake(("weights",))
    assert (report.bytes_still_held, pools.asleep) == (num_bytes, 0)
    assert weights.data_ptr() == place
    assert view.tolist() == [float(n) for n in range(1000, 1010)]


TOUCH = """
import torch
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
pools = SubstituteDeviceOps(1, 1 << 30).pools
with pools.use("weights"):
    weights = torch.zeros(1000)
print(weights.sum().item(), flush=True)
pools.sleep(("weights",))
{wake}
print(weights.sum().item(), flush=True)
"""


@pytest.mark.parametrize(
    ("wake", "code", "told"),
    [("", -signal.SIGSEGV, "0.0\n"), ("pools.wake(('weights',))", 0, "0.0\n0.0\n")],
)
def test_what_sleeps_cannot_be_touched(wake, code, told):
    done = subprocess.run(
        [sys.executable, "-c", TOUCH.format(wake=wake)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, told), done.stderr


def test_a_range_without_memory_is_given_up_too(pools):
    with pools.use("weights"):
        weights = torch.zeros(10)
    pools.sleep(("weights",))
    del weights
    gc.collect()
    assert pools._pieces == {}
    assert pools.memory.mapped == 0


def test_memory_that_is_not_there_is_an_error_and_leaves_nothing():
    memory = HostVirtualMemory(limit=8 * 4096)
    pools = pools_over(memory)
    with pools.use("weights"):
        kept = torch.zeros(4 * 4096, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="16384 of 32768 are mapped"):
            torch.zeros(5 * 4096, dtype=torch.uint8)
    assert pools.held() == memory.mapped == kept.nbytes
    with pytest.raises(torch.OutOfMemoryError, match="mmap of 4611686018427387904 bytes"):
        memory.reserve(1 << 62)


def test_small_tensors_share_pages_until_one_is_full_or_asleep(pools):
    page = pools.memory.granularity
    with pools.use("weights"):
        first = [torch.empty(page // 4, dtype=torch.uint8) for _ in range(4)]
        assert pools.held() == page
        large = torch.empty(page // 2 + 1, dtype=torch.uint8)
        assert pools.held() == 2 * page
        second = torch.empty(1)
        assert pools.held() == 3 * page
        pools.sleep(("weights",))
        third = torch.zeros(1)
    assert pools.held() == page
    assert third.item() == 0.0
    with pools.use("kv_cache"):
        other = torch.empty(1)
    assert pools.held(["kv_cache"]) == page
    del first, large, second, third, other
    gc.collect()
    assert (pools.held(), pools.asleep, pools.memory.mapped) == (0, 0, 0)


def test_zeros_are_zero_where_new_memory_is_not():
    class Rubbish(HostVirtualMemory):
        new_is_zero = False

        def map(self, address, num_bytes):
            super().map(address, num_bytes)
            self.write(address, torch.full((num_bytes,), 0x5A, dtype=torch.uint8))

    with pools_over(Rubbish()).use("weights"):
        made = torch.zeros(3), torch.zeros_like(torch.empty(2)), torch.empty(1).new_zeros(4)
        rubbish = torch.empty(4, dtype=torch.uint8)
    assert not any(each.any() for each in made)
    assert rubbish.tolist() == [0x5A] * 4


def test_figures_are_of_all_pools_of_the_process(pools):
    before, other = held_by_all(pools.device), pools_over(HostVirtualMemory())
    with pools.use("weights"), torch.device("meta"):
        far = torch.empty(MIB)
    with pools.use("weights"):
        mine = torch.empty(MIB, dtype=torch.uint8)
    with other.use("weights"):
        others = torch.empty(2 * MIB, dtype=torch.uint8)
    assert held_by_all(pools.device) == before + 3 * MIB
    assert (pools.held(), other.held(), far.device.type) == (mine.nbytes, others.nbytes, "meta")
    assert held_by_all(torch.device("meta")) == 0


def test_what_torch_keeps_is_asked_for_before_memory_is_lacking():
    memory, asked = HostVirtualMemory(limit=2 * MIB), []

    def give_back():
        asked.append(memory.mapped)
        memory.limit += MIB

    pools = pools_over(memory, give_back=give_back)
    with pools.use("weights"):
        made = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
    assert (asked, len(made), pools.held()) == ([2 * MIB], 3, 3 * MIB)


class Slow(HostVirtualMemory):
    """A driver that is asked for memory, and takes its time."""

    def __init__(self):
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def map(self, address, num_bytes):
        self.asked.set()
        assert self.may.wait(120)
        super().map(address, num_bytes)


@pytest.mark.parametrize("size", [8, MIB])
def test_while_the_driver_is_asked_other_threads_take_and_end_tensors(size):
    """No lock is held then that an end of a tensor needs: of torch's none, of these pools none."""
    memory = Slow()
    pools = pools_over(memory)
    memory.may.set()
    with pools.use("weights"):
        living = [torch.empty(size, dtype=torch.uint8) for _ in range(4)]
        cycle = [torch.empty(size, dtype=torch.uint8)]
        cycle.append(cycle)
    held = pools.held()
    memory.asked.clear()
    memory.may.clear()

    def make():
        with pools.use("kv_cache"):
            return torch.empty(size, dtype=torch.uint8)

    def end():
        living.clear()
        gc.collect()
        return pools.held()

    with ThreadPoolExecutor(2) as threads:
        made = threads.submit(make)
        assert memory.asked.wait(120)
        del cycle
        try:
            assert threads.submit(end).result(120) < held
            assert not made.done()
        finally:
            memory.may.set()
        assert made.result(120).numel() == size


def test_an_end_of_a_tensor_within_the_pools_own_lock_waits_for_nobody(pools):
    """As where a collection of garbage comes in between."""
    with pools.use("weights"):
        gone = [torch.empty(MIB, dtype=torch.uint8)]
    left = []

    def within():
        with pools._lock:
            gone.clear()
            left.append(pools.held())

    thread = threading.Thread(target=within, daemon=True)
    thread.start()
    thread.join(120)
    assert left == [0]


def test_tensors_that_lie_elsewhere_move_in_and_stay_what_they_are_to_each_other(pools):
    whole = torch.arange(24, dtype=torch.float32)
    tensors = {
        "whole": whole, "part": whole[4:20].view(4, 4).T, "halves": whole.view(torch.float16)[1::2],
        "alone": torch.ones(3), "far": torch.ones(3, device="meta"), "nothing": torch.empty(0),
    }  # fmt: skip
    with pools.use("weights"):
        tensors["here"] = torch.zeros(7)
    sparse = torch.eye(3).to_sparse()
    values = {name: each.tolist() for name, each in tensors.items() if name != "far"}
    here, inference = tensors["here"].data_ptr(), None
    with torch.inference_mode():
        inference = torch.ones(2).add(1)
    left = pools.take_in("weights", {**tensors, "sparse": sparse, "inference": inference})
    assert list(left) == ["sparse"]
    moved = [each for name, each in tensors.items() if name not in ("far", "nothing")]
    assert all(pools._inside("weights", each.data_ptr()) for each in (*moved, inference))
    assert tensors["here"].data_ptr() == here
    assert {name: each.tolist() for name, each in tensors.items() if name != "far"} == values
    whole[4] = -1
    assert (tensors["part"][0, 0].item(), inference.tolist()) == (-1, [2.0, 2.0])
    assert pools.take_in("weights", tensors) == {}
    held = pools.held()
    pools.sleep(("weights",), keep=("weights",))
    pools.wake(("weights",))
    assert (whole[4].item(), pools.held()) == (-1, held)
