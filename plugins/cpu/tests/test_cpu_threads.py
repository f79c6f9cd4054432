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
