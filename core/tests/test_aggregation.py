"""Joining connector reports: each transfer once, when the last expected rank has told."""

from __future__ import annotations

import random

import pytest
from hardpoint.aggregation import ECOutputAggregator, KVOutputAggregator
from hardpoint.messages import (
    ECConnectorOutput,
    KVConnectorOutput,
    MessageError,
    ModelRunnerOutput,
)


def kv(rank, step, sent=(), received=(), **fields):
    return KVConnectorOutput(
        rank=rank,
        step_id=step,
        finished_sending=frozenset(sent),
        finished_receiving=frozenset(received),
        **fields,
    )


def test_a_request_is_told_on_the_step_of_the_last_rank():
    joined = KVOutputAggregator(3)
    first = joined.join([kv(0, 1, sent="a"), kv(1, 1), None])
    assert (first.rank, first.step_id, first.finished_sending) == (-1, 1, frozenset())
    assert joined.join([kv(0, 2), kv(1, 2, sent="a"), None]).finished_sending == frozenset()
    assert joined.join([None, None, kv(2, 3, sent="a")]).finished_sending == {"a"}
    assert joined.join([kv(0, 4), kv(1, 4), kv(2, 4)]).finished_sending == frozenset()


def test_steps_without_reports_give_nothing():
    assert KVOutputAggregator(2).join([None, None]) is None
    assert KVOutputAggregator(2).join([]) is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_random_orders_and_duplicates_tell_each_request_exactly_once(world_size):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed: {seed}")
    source = random.Random(seed)
    expected = source.randint(1, world_size)
    joined = KVOutputAggregator(expected)
    requests = [f"r{number}" for number in range(40)]
    due = {(name, rank): source.randrange(30) for name in requests for rank in range(world_size)}
    told = {}
    for step in range(30):
        reports = [
            kv(rank, step, sent=[n for n in requests if due[n, rank] == step])
            for rank in range(world_size)
        ]
        reports += source.choices(reports, k=2)
        source.shuffle(reports)
        for name in joined.join(reports).finished_sending:
            assert name not in told, f"seed {seed}"
            told[name] = step
    for name in requests:
        ranked = sorted(due[name, rank] for rank in range(world_size))
        assert told[name] == ranked[expected - 1], f"seed {seed}"


def test_one_rank_that_tells_twice_counts_once():
    joined = KVOutputAggregator(2)
    report = kv(0, 1, sent="a")
    assert joined.join([report, report]).finished_sending == frozenset()
    assert joined.join([report]) is None
    assert joined.join([kv(0, 2, sent="a")]).finished_sending == frozenset()
    assert joined.join([kv(1, 2, sent="a")]).finished_sending == {"a"}


def test_a_worker_may_raise_what_is_expected():
    joined = KVOutputAggregator(1)
    first = joined.join([kv(0, 1, sent="a", expected_reports=2)])
    assert (first.finished_sending, first.expected_reports) == (frozenset(), 2)
    assert joined.join([kv(1, 2, sent="a", expected_reports=1)]).finished_sending == {"a"}
    with pytest.raises(ValueError, match="at least 1"):
        KVOutputAggregator(0)


def test_a_failed_receive_is_told_together_with_its_completion():
    joined = KVOutputAggregator(2)
    first = joined.join([kv(0, 1, received="a", failed_receiving=frozenset("a"))])
    assert (first.finished_receiving, first.failed_receiving) == (frozenset(), frozenset())
    second = joined.join([kv(1, 2, received="a")])
    assert (second.finished_receiving, second.failed_receiving) == ({"a"}, {"a"})
    third = joined.join([kv(0, 3, received="b"), kv(1, 3, received="b")])
    assert third.failed_receiving == frozenset()


def test_blocks_and_extras_of_all_ranks_are_joined():
    joined = KVOutputAggregator(2)
    report = joined.join(
        [
            kv(1, 1, invalid_blocks=frozenset({3}), extra={"files": "one"}),
            kv(0, 1, invalid_blocks=frozenset({2, 3}), extra={"files": "zero", "other": 1}),
        ]
    )
    assert report.invalid_blocks == {2, 3}
    assert report.extra == {"files": ((0, "zero"), (1, "one")), "other": ((0, 1),)}


def test_an_aborted_request_is_forgotten_with_what_is_still_to_come():
    joined = KVOutputAggregator(2)
    joined.join([kv(0, 1, sent="ab", received="c", failed_receiving=frozenset("c"))])
    joined.forget("a")
    joined.forget("c")
    late = joined.join(
        [kv(1, 2, sent="ab", received="c", failed_receiving=frozenset("c")), kv(0, 2, sent="a")]
    )
    assert late.finished_sending == {"b"}
    assert late.finished_receiving == late.failed_receiving == frozenset()
    assert joined.overdue(100, 1) == frozenset()
    joined.begin("a")
    again = joined.join([kv(0, 3, sent="a"), kv(1, 3, sent="a")])
    assert again.finished_sending == {"a"}


def test_a_late_report_of_a_finished_request_waits_for_nobody():
    joined = KVOutputAggregator(1)
    assert joined.join([kv(0, 1, sent="a")]).finished_sending == {"a"}
    assert joined.join([kv(1, 2, sent="a")]).finished_sending == frozenset()
    assert joined.overdue(1000, 1) == frozenset()


def test_what_some_rank_never_tells_is_overdue():
    joined = KVOutputAggregator(2)
    joined.join([kv(0, 1, sent="a")])
    joined.join([kv(0, 6, received="b")])
    assert joined.overdue(10, 8) == {"a"}
    assert joined.overdue(10, 2) == {"a", "b"}
    assert joined.overdue(10, 20) == frozenset()


def test_forgetting_does_not_grow_without_bound():
    joined = KVOutputAggregator(2)
    for number in range(10_000):
        joined.forget(f"r{number}")
    assert len(joined._sending._settled) == 4096


def output(step, kv=None, ec=None, req_ids=("x",)):
    return ModelRunnerOutput(step_id=step, req_ids=req_ids, tokens=((1,),), kv=kv, ec=ec)


def test_the_joined_report_comes_with_the_output_ranks_output():
    joined = KVOutputAggregator(2)
    own = output(1, kv(1, 1, sent="a"))
    result = joined.aggregate([output(1, kv(0, 1, sent="a"), req_ids=("y",)), own], 1)
    assert (result.req_ids, result.tokens) == (own.req_ids, own.tokens)
    assert result.kv.finished_sending == {"a"}
    assert own.kv.finished_sending == {"a"}, "the message itself is not changed"
    assert own.kv.rank == 1


def test_reports_are_not_lost_when_the_output_rank_has_no_output():
    joined = KVOutputAggregator(1)
    result = joined.aggregate([output(4, kv(0, 4, sent="a")), None], 1)
    assert (result.step_id, result.req_ids) == (4, ())
    assert result.kv.finished_sending == {"a"}
    with pytest.raises(MessageError, match="no rank has an output"):
        joined.aggregate([None, None], 0)


def ec(rank, step, sent=(), received=(), **fields):
    return ECConnectorOutput(
        rank=rank,
        step_id=step,
        finished_sending=frozenset(sent),
        finished_receiving=frozenset(received),
        **fields,
    )


def test_encoder_reports_are_united():
    joined = ECOutputAggregator()
    report = joined.join([ec(1, 1, sent="a", extra={"n": 2}), ec(0, 1, sent="ab", received="c")])
    assert (report.rank, report.finished_sending, report.finished_receiving) == (
        -1,
        {"a", "b"},
        {"c"},
    )
    assert report.extra == {"n": ((1, 2),)}
    assert joined.join([None]) is None
    assert joined.join([ec(1, 1, sent="z")]) is None, "a report that came before"
    assert joined.join([ec(1, 2, sent="a")]).finished_sending == {"a"}, "an item may move again"


def test_an_encoder_item_can_be_forgotten():
    joined = ECOutputAggregator()
    joined.forget("a")
    assert joined.join([ec(0, 1, sent="ab")]).finished_sending == {"b"}
    joined.begin("a")
    result = joined.aggregate([output(2, ec=ec(0, 2, sent="a"))], 0)
    assert result.ec.finished_sending == {"a"}
