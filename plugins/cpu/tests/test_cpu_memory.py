from __future__ import annotations

import os
from pathlib import Path

import pytest
from hardpoint_cpu.memory import forget_peak, host_memory, resident, resident_peak

GIB = 1 << 30
JOB = "sys/fs/cgroup/user/job"
V1_JOB = "sys/fs/cgroup/memory/user/job"
NO_LIMIT = str(0x7FFFFFFFFFFFF000)


def test_without_control_groups_it_is_the_machine_s(kernel):
    host = host_memory(kernel())
    assert (host.total, host.free, host.source) == (16 * GIB, 12 * GIB, "the machine")


def test_version_2_limit(v2):
    files = {
        f"{JOB}/memory.max": str(4 * GIB),
        f"{JOB}/memory.current": str(3 * GIB),
        f"{JOB}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    host = host_memory(v2(files))
    assert (host.total, host.free) == (4 * GIB, 2 * GIB)  # file pages can be given up
    assert host.source.endswith("sys/fs/cgroup/user/job")


def test_version_1_limit(v1):
    files = {
        f"{V1_JOB}/memory.limit_in_bytes": str(4 * GIB),
        f"{V1_JOB}/memory.usage_in_bytes": str(3 * GIB),
        f"{V1_JOB}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    host = host_memory(v1(files))
    assert (host.total, host.free) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("text", ["max", "", "a lot"])
def test_version_2_without_a_limit(v2, text):
    host = host_memory(v2({f"{JOB}/memory.max": text, f"{JOB}/memory.current": str(9 * GIB)}))
    assert (host.total, host.free) == (16 * GIB, 12 * GIB)


def test_version_1_without_a_limit(v1):
    host = host_memory(v1({f"{V1_JOB}/memory.limit_in_bytes": NO_LIMIT}))
    assert (host.total, host.source) == (16 * GIB, "the machine")


def test_a_limit_around_the_group_counts(v2):
    files = {
        f"{JOB}/memory.max": "max",
        "sys/fs/cgroup/user/memory.max": str(5 * GIB),
        "sys/fs/cgroup/user/memory.current": str(5 * GIB - 100),
    }
    host = host_memory(v2(files))
    assert (host.total, host.free) == (5 * GIB, 100)


def test_a_limit_above_the_machine_s_memory_does_not_raise_it(v2):
    host = host_memory(v2({f"{JOB}/memory.max": str(64 * GIB)}))
    assert (host.total, host.source) == (16 * GIB, "the machine")


def test_free_memory_of_the_machine_counts_within_a_limit(v2):
    host = host_memory(v2({f"{JOB}/memory.max": str(15 * GIB), f"{JOB}/memory.current": "0"}))
    assert (host.total, host.free) == (15 * GIB, 12 * GIB)


def test_a_group_over_its_limit_has_nothing_free(v2):
    host = host_memory(v2({f"{JOB}/memory.max": str(GIB), f"{JOB}/memory.current": str(2 * GIB)}))
    assert host.free == 0


def test_a_container_s_group_is_mounted_as_the_root(kernel):
    """Version 1 in a container: the name is the host's, the mount shows the group itself."""
    root = kernel(
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB)},
        groups="4:memory:/docker/abc\n",
        mounts="31 20 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
    )
    assert host_memory(root).total == 2 * GIB


@pytest.mark.parametrize("path", ["/../../outside", "/not/there"])
def test_a_group_that_is_not_visible_falls_back_to_the_mount(kernel, path):
    root = kernel(
        {"sys/fs/cgroup/memory.max": str(3 * GIB)},
        groups=f"0::{path}\n",
        mounts="30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    )
    assert host_memory(root).total == 3 * GIB


def test_both_versions_at_once(kernel):
    root = kernel(
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(6 * GIB),
            "sys/fs/cgroup/unified/memory.max": str(5 * GIB),
        },
        groups="4:memory:/\n0::/\n",
        mounts=(
            "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 20 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        ),
    )
    assert host_memory(root).total == 5 * GIB


def test_odd_lines_are_passed_over(kernel):
    root = kernel(mounts="rubbish\n1 2 3\n30 20 0:26 / /x rw - cgroup2\n", groups="0::/\n")
    assert host_memory(root).total == 16 * GIB


def test_this_machine():
    host = host_memory()
    assert 0 < host.free <= host.total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < resident() <= resident_peak()


def test_the_peak_can_be_forgotten_and_found():
    if not forget_peak():
        pytest.skip("the kernel does not let this process forget its peak")
    before = resident_peak()
    block = bytearray(64 << 20)
    block[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(block[:: os.sysconf("SC_PAGE_SIZE")])
    del block
    grown = resident_peak()
    assert grown - before >= 60 << 20
    assert forget_peak()
    assert resident_peak() < grown


def test_a_peak_that_cannot_be_forgotten_is_said(tmp_path):
    assert forget_peak(Path(tmp_path)) is False
