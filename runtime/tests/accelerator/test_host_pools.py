"""Pages of the host that stand for a device's memory: taken away and brought back for real."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.host_pools import HostPools

MIB = 1 << 20


@pytest.fixture
def pools():
    return HostPools(
        HostVirtualMemory(), lambda shape, dtype: torch.empty(shape, dtype=dtype), lambda: None
    )


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
    assert pools.held(["weights"]) == len(made) * page
    assert {each.data_ptr() % page for each in made} == {0}
    assert not made[1].any()
    assert made[2].stride() == (1, 2)
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
from hardpoint_runtime.accelerator.host_memory import HostVirtualMemory
from hardpoint_runtime.accelerator.host_pools import HostPools
pools = HostPools(HostVirtualMemory(), lambda s, d: torch.empty(s, dtype=d), lambda: None)
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
    pools = HostPools(memory, lambda shape, dtype: torch.empty(shape, dtype=dtype), lambda: None)
    with pools.use("weights"):
        kept = torch.zeros(4 * 4096, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="16384 of 32768 are mapped"):
            torch.zeros(5 * 4096, dtype=torch.uint8)
    assert pools.held() == memory.mapped == kept.nbytes
    with pytest.raises(torch.OutOfMemoryError, match="mmap of 4611686018427387904 bytes"):
        memory.reserve(1 << 62)
