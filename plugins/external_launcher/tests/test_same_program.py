"""Ranks that run one program: the same results everywhere; an error where they are not alike."""

from __future__ import annotations

import json

import pytest


def told(ranks, count):
    """Return the lines of every rank; all must have ended well."""
    assert ranks.wait() == [0] * count, [ranks.error(rank) for rank in range(count)]
    return [ranks.out(rank).splitlines() for rank in range(count)]


def test_every_rank_has_the_same_results_drawn_ones_too(launch):
    """No seed is given: the ranks agree on one (case B8)."""
    first, second = told(launch("generate", 2), 2)
    assert first == second
    results, ranks, one, listening, health = map(json.loads, first)
    assert listening == [], "once all have met, nothing listens"
    assert all(len(row) == 8 for row in results["greedy"] + results["drawn"])
    assert sum(map(len, results["drawn"])) > 100
    assert results["drawn"][:3] != results["greedy"]
    assert (ranks, one, health) == ([0, 1], 1, [0, 1])


@pytest.mark.slow
def test_an_engine_may_follow_another(launch):
    first, second = told(launch("twice", 2), 2)
    assert first == second
    assert first[0] == first[1]


@pytest.mark.slow
def test_two_groups_live_on_one_host_at_other_ports(launch):
    """Case B7."""
    one, two = launch("twice", 2), launch("twice", 2)
    assert told(one, 2) == told(two, 2)


@pytest.mark.slow
def test_memory_is_the_least_of_all_ranks(launch):
    """Row E9."""
    first, second = told(launch("memory", 2), 2)
    assert first == second
    (alone,) = {line[0] for line in told(launch("memory", 1), 1)}
    assert 1 < int(first[0]) < int(alone)


@pytest.mark.slow
def test_an_error_of_one_rank_reaches_all_and_ends_that_call_alone(launch):
    first, second = told(launch("failing", 2), 2)
    assert first == second
    assert first[0] == "1 KeyError 'of this rank'"
    assert first[1] == "late True"
    assert len(json.loads(first[2])) == 3
    assert first[3] == "0"


def test_plans_that_differ_are_an_error_that_names_field_and_rank(launch):
    ranks = launch("differ", 2)
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
        ranks.processes[rank].stdin.write(b"go\n")
        ranks.processes[rank].stdin.flush()
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        said = ranks.out(rank)
        assert "the ranks diverged" in said or "gave up: the ranks diverged" in said
        assert "SchedulerOutput.new on rank 1 is not that on rank 0" in said


def test_a_rank_that_chooses_another_token_is_an_error_that_names_it(launch):
    """Its plans are as the others', whose worker's tokens are the results."""
    ranks = launch("differ_in_samples", 2)
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert "ModelRunnerOutput.tokens on rank 1 is not that on rank 0" in ranks.out(rank)


@pytest.mark.slow
def test_calls_that_differ_are_an_error_that_names_both(launch):
    ranks = launch("differ_in_calls", 2)
    for rank in (0, 1):
        launch.settle(lambda rank=rank: "at gate" in ranks.out(rank))
        ranks.processes[rank].stdin.write(b"go\n")
        ranks.processes[rank].stdin.flush()
    assert ranks.wait() == [1, 1]
    text = "rank 1 calls 'supported_tasks' where rank 0 calls 'get_kv_cache_spec'"
    assert all(text in ranks.out(rank) for rank in (0, 1))


@pytest.mark.slow
def test_a_rank_that_is_done_too_early_is_named(launch):
    ranks = launch("fewer", 2)
    assert ranks.wait() == [1, 0]
    assert "rank 1 (pid" in ranks.out(0)
    assert "shut its engine down, and 'execute_model' needs every rank" in ranks.out(0)


@pytest.mark.slow
def test_ranks_that_are_configured_differently_refuse_to_start(launch):
    ranks = launch("own_block_size", 2)
    assert ranks.wait() == [1, 1]
    text = "the ranks were not started alike: block_size is 4 on rank 0 and 8 on rank 1"
    assert all(text in ranks.out(rank) for rank in (0, 1))
