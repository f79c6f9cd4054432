from __future__ import annotations

import os

import pytest
from hardpoint_cpu.settings import CpuSettings
from hardpoint_cpu.threads import (
    Cores,
    chosen_cores,
    parse_cpus,
    problems,
    share_of,
    thread_count,
    usable_cores,
)

FOUR = Cores(ids=(0, 2, 5, 7))


@pytest.mark.parametrize(
    ("file", "text", "quota"),
    [
        ("v2", "150000 100000", 1.5),
        ("v2", "max 100000", None),
        ("v2", "", None),
        ("v1", "250000", 2.5),
        ("v1", "-1", None),
    ],
)
def test_a_quota_leaves_fewer_threads_than_cores(v1, v2, file, text, quota):
    if file == "v2":
        root = v2({"sys/fs/cgroup/user/job/cpu.max": text})
    else:
        folder = "sys/fs/cgroup/cpu,cpuacct/user/job"
        root = v1({f"{folder}/cpu.cfs_quota_us": text, f"{folder}/cpu.cfs_period_us": "100000"})
    cores = usable_cores(root, affinity={5, 1, 3, 2})
    assert cores == Cores(ids=(1, 2, 3, 5), quota=quota)
    assert cores.count == {None: 4, 1.5: 2, 2.5: 3}[quota]


def test_the_tightest_quota_of_the_groups_counts(v2):
    root = v2(
        {"sys/fs/cgroup/user/job/cpu.max": "max", "sys/fs/cgroup/user/cpu.max": "50000 100000"}
    )
    assert usable_cores(root, affinity={0, 1}).count == 1


def test_cores_are_those_of_the_cpuset():
    assert usable_cores().ids == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-3,6", (0, 1, 2, 3, 6)), (" 4 , 2-3", (2, 3, 4))],
)
def test_lists_of_cores(text, cores):
    assert parse_cpus(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "1,,2", "0x1", "3-1", "0-99999999999"])
def test_what_is_no_list_of_cores(text):
    with pytest.raises(ValueError, match="neither a core nor a range"):
        parse_cpus(text)


def test_more_threads_than_cores_is_a_problem():
    (problem,) = problems(CpuSettings(threads=5), FOUR)
    assert problem.key == "plugins.cpu.threads"
    assert problem.value == 5
    assert "more threads than the 4 cores that may be used (0, 2, 5, 7)" in problem.message
    assert problem.way_out == "Set it to at most 4, or leave it unset."
    assert problems(CpuSettings(threads=4), FOUR) == []


def test_threads_are_counted_on_the_chosen_cores():
    assert problems(CpuSettings(threads=2, cpus="2,7"), FOUR) == []
    (problem,) = problems(CpuSettings(threads=3, cpus="2,7"), FOUR)
    assert "more threads than the 2 cores" in problem.message
    assert chosen_cores(CpuSettings(cpus="2,7"), FOUR).ids == (2, 7)


@pytest.mark.parametrize(
    ("cpus", "text"),
    [("0-2", "cores 1 are not in this process's cpuset"), ("zero", "neither a core nor a range")],
)
def test_cores_outside_the_cpuset_are_a_problem(cpus, text):
    (problem,) = problems(CpuSettings(cpus=cpus), FOUR)
    assert (problem.key, problem.value) == ("plugins.cpu.cpus", cpus)
    assert text in problem.message
    assert problem.way_out == "Usable cores are 0, 2, 5, 7."


@pytest.mark.parametrize(
    ("settings", "environ", "count"),
    [
        (CpuSettings(), {}, 4),
        (CpuSettings(), {"OMP_NUM_THREADS": "3"}, 3),
        (CpuSettings(), {"OMP_NUM_THREADS": "64"}, 4),
        (CpuSettings(), {"OMP_NUM_THREADS": "2,1"}, 2),
        (CpuSettings(), {"OMP_NUM_THREADS": "many"}, 4),
        (CpuSettings(threads=1), {"OMP_NUM_THREADS": "3"}, 1),
    ],
)
def test_how_many_threads(settings, environ, count):
    assert thread_count(settings, FOUR, environ) == count


def test_a_quota_bounds_the_default_only():
    cores = Cores(ids=(0, 1, 2, 3), quota=2.0)
    assert thread_count(CpuSettings(), cores, {}) == 2
    assert thread_count(CpuSettings(threads=4), cores, {}) == 4


@pytest.mark.parametrize(
    ("workers", "shares"),
    [
        (1, [(0, 2, 5, 7)]),
        (2, [(0, 2), (5, 7)]),
        (3, [(0,), (2,), (5, 7)]),
        (4, [(0,), (2,), (5,), (7,)]),
        (6, [(0,), (2,), (5,), (7,), (0,), (2,)]),
    ],
)
def test_workers_share_the_cores(workers, shares):
    assert [share_of(FOUR.ids, index, workers) for index in range(workers)] == shares


def siblings(*groups: str) -> dict[str, str]:
    """The kernel's files about cores that are one, as it lists them."""
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {folder.format(core): f"{group}\n" for group in groups for core in parse_cpus(group)}


def test_of_siblings_one_counts(kernel):
    root = kernel(siblings("0,4", "1,5", "2,6", "3,7"))
    cores = usable_cores(root, affinity=range(8))
    assert cores.count == 4
    assert thread_count(CpuSettings(), cores, {}) == 4
    assert thread_count(CpuSettings(threads=8), cores, {}) == 8  # it is said
    assert problems(CpuSettings(threads=8), cores) == []
    assert usable_cores(root, affinity={0, 4}).count == 1
    assert usable_cores(root, affinity={4, 5}).count == 2  # their siblings are another's
    assert chosen_cores(CpuSettings(cpus="0,1,4"), cores).count == 2
    assert usable_cores(kernel(siblings("0-1", "2-3")), affinity=range(4)).count == 2


def test_a_quota_below_the_siblings_counts(v2):
    files = {**siblings("0,2", "1,3"), "sys/fs/cgroup/user/job/cpu.max": "100000 100000"}
    assert usable_cores(v2(files), affinity=range(4)).count == 1


@pytest.mark.parametrize(
    ("workers", "shares"),
    [
        (2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (3, [(0, 4), (1, 5), (2, 3, 6, 7)]),
        (4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (8, [(core,) for core in range(8)]),
    ],
)
def test_workers_get_cores_of_their_own(kernel, workers, shares):
    root = kernel(siblings("0,4", "1,5", "2,6", "3,7"))
    cores = usable_cores(root, affinity=range(8))
    found = [cores.share(index, workers) for index in range(workers)]
    assert [each.ids for each in found] == shares
    taken = [core for each in found for core in each.ids]
    assert sorted(taken) == list(range(8))  # nobody shares
    assert [each.count for each in found] == {
        2: [2, 2], 3: [1, 1, 2], 4: [1] * 4, 8: [1] * 8
    }[workers]  # fmt: skip


def test_workers_get_parts_of_the_quota():
    cores = Cores(ids=tuple(range(8)), quota=4.0)
    assert [cores.share(index, 2).count for index in range(2)] == [2, 2]
