"""A rank that ends, stops or hangs ends the others, with an error that says which."""

from __future__ import annotations

import os
import re
import signal

import pytest

DRIVER = "plugins.external_launcher.driver_only=true"


def fault(what):
    return f'plugins.dummy.fail_at="{what}"'


@pytest.mark.parametrize(
    "point",
    [
        "step",
        pytest.param("build", marks=pytest.mark.slow),
        pytest.param("init_device", marks=pytest.mark.slow),
        pytest.param("load", marks=pytest.mark.slow),
        pytest.param("warm_up", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_at_any_point_is_named_by_the_others(launch, point):
    ranks = launch("generate", 2, fault(f"{point}@1=kill"))
    assert ranks.wait() == [1, -signal.SIGKILL]
    pid = ranks.processes[1].pid
    assert f"rank 1 (pid {pid}) ended" in ranks.out(0)


@pytest.mark.slow
def test_of_three_ranks_both_others_name_the_dead_one(launch):
    ranks = launch("generate", 3, fault("step@2=kill"))
    assert ranks.wait() == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        assert f"rank 2 (pid {ranks.processes[2].pid}) ended" in ranks.out(rank)
        assert "hearing the other ranks raised" not in ranks.error(rank)


@pytest.mark.slow
def test_a_rank_killed_between_calls_is_noticed_at_once(launch):
    ranks = launch("idle", 2)
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
    ranks.processes[1].kill()
    assert ranks.wait(0) == [1]
    assert f"rank 1 (pid {ranks.processes[1].pid}) ended" in ranks.out(0)


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_is_interrupted_at_its_work_is_named_by_the_others(launch, leaver):
    """It ends in good order, and its worker's work with it; that is no error of the call."""
    ranks = launch("long_steps", 3)
    for rank in range(3):
        launch.settle(lambda rank=rank: "at step" in ranks.out(rank))
    ranks.processes[leaver].send_signal(signal.SIGINT)
    ranks.wait(leaver)
    others = sorted({0, 1, 2} - {leaver})
    assert ranks.wait(*others) == [1, 1]
    named = f"rank {leaver} (pid {ranks.processes[leaver].pid})"
    for rank in others:
        assert named in ranks.out(rank), ranks.error(rank)
        assert "the driver ended this work" not in ranks.out(rank)


@pytest.mark.slow
def test_a_stopped_rank_is_given_up_by_the_others(launch):
    ranks = launch("held", 2, "plugins.dummy.silent_after=3.0")
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at step" in ranks.out(rank))
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    assert ranks.wait(0) == [1]
    assert re.search(r"worker rank 1 \(pid \d+\) was not heard for [3-9]", ranks.out(0))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_at_the_deadline(launch):
    ranks = launch("missing", 2, "plugins.external_launcher.start_timeout=2.0")
    assert ranks.wait() == [1, 0]
    assert "rank 1: not come to 127.0.0.1:" in ranks.out(0)
    assert "plugins.external_launcher.start_timeout" in ranks.out(0)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_call_that_another_one_failed_in(launch):
    """Ranks that wait for one that raised are given up a second later."""
    ranks = launch("generate", 2, fault("step@1=raise,step@0=hang"))
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert "worker rank 1 raised" in ranks.out(rank)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_with_one_driver_the_end_of_any_rank_ends_the_others(launch, victim):
    ranks = launch("generate", 2, DRIVER, fault(f"step@{victim}=kill"))
    other = 1 - victim
    assert ranks.wait(victim) == [-signal.SIGKILL]
    assert ranks.wait(other) == [1]
    assert f"rank {victim} (pid {ranks.processes[victim].pid}) ended" in ranks.out(other)
