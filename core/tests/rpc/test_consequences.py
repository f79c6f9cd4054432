"""The first cause is told, not what followed from it on other ranks (V1)."""

from __future__ import annotations

import itertools

import pytest
from hardpoint.errors import (
    CallTimeoutError,
    CancelledStepError,
    ExecutorFailedError,
    HardpointError,
    RemoteError,
    WorkerDiedError,
)
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable, RemoteFailure, Reply
from hardpoint.rpc.supervision import Fail, Supervisor


class FollowedError(HardpointError):
    """What a rank raises whose peer is gone."""

    consequence = True


class Group:
    def __init__(self, size=3):
        self.table = CallTable()
        self.gather = self.table.open(Call(call_id=1, generation=0, method="m"), size)

    def tell(self, rank, what):
        failure = {
            "cause": RemoteFailure.of(ValueError("the cause")),
            "follows": RemoteFailure.of(FollowedError(f"rank {rank} lost a peer")),
            "value": None,
        }[what]
        value = codec.pack(rank, "v") if failure is None else None
        self.table.deliver(Reply(call_id=1, rank=rank, generation=0, value=value, failure=failure))

    def error(self):
        future = self.gather.future
        return future.exception(0) if future.done() else None


@pytest.mark.parametrize(
    "order", list(itertools.permutations([(0, "follows"), (1, "cause"), (2, "follows")]))
)
def test_an_own_error_is_told_before_those_that_follow_from_it(order):
    group = Group()
    for rank, what in order:
        group.tell(rank, what)
        if what == "cause":
            assert type(group.error().__cause__) is ValueError  # at once
    assert group.error().rank == 1
    assert group.table.pending == 0


@pytest.mark.parametrize("last", ["value", "follows"])
def test_what_follows_is_told_if_nobody_has_a_cause(last):
    group = Group(2)
    group.tell(1, "follows")
    assert group.error() is None
    group.tell(0, last)
    assert isinstance(group.error(), RemoteError)
    assert group.error().rank == 1
    assert group.error().consequence


def test_a_death_is_told_before_what_follows_from_it():
    group = Group()
    group.tell(0, "follows")
    death = WorkerDiedError(rank=1, pid=5, exit=-9)
    group.table.fail_all(death)
    assert group.error() is death


def test_a_timeout_tells_what_was_held_back():
    group = Group()
    group.tell(0, "follows")
    group.table.expire(1)
    assert isinstance(group.error(), RemoteError)
    empty = Group()
    empty.table.expire(1)
    assert isinstance(empty.error(), CallTimeoutError)


def remote(error):
    return RemoteFailure.of(error).raised_by(0, "m")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_group_is_given_up_by_the_cause(order):
    supervisor = Supervisor(
        3, 0.0, missing=lambda call_id: [2], heartbeat=1.0, silent_after=60.0, grace=1.0
    )
    errors = [remote(FollowedError("lost")), remote(ValueError("the cause"))]
    for rank in range(3):
        supervisor.ready(rank, 0.0)
    for index in order:
        supervisor.erred(index, 7, errors[index], 0.1)
    [fail] = [each for each in supervisor.tick(1.2) if isinstance(each, Fail)]
    assert isinstance(fail.error, ExecutorFailedError)
    assert fail.error.__cause__ is errors[1]


def test_only_hardpoint_s_own_errors_can_say_that_they_follow():
    class OddError(Exception):
        consequence = True

    assert not RemoteFailure.of(OddError()).consequence
    assert not RemoteFailure.of(ValueError()).consequence
    assert RemoteFailure.of(CancelledStepError("ended")).consequence
