"""The supervisor: who is accused, of what, when, and who never is."""

from __future__ import annotations

import pytest
from hardpoint.errors import (
    ExecutorFailedError,
    RemoteError,
    StartTimeoutError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call, CallTable, RemoteFailure, Reply
from hardpoint.rpc.supervision import (
    LEAVE_WAIT,
    STACK_WAIT,
    DumpStack,
    EndCollectives,
    Fail,
    Kill,
    Supervisor,
    Warn,
)

BEAT = 0.05


class Group:
    """A supervisor with a clock, and what it did."""

    def __init__(self, world_size=3, *, started=True, **options):
        self.now = 100.0
        self.waiting = {}
        options = {"heartbeat": BEAT, "silent_after": 1.0, **options}
        self.supervisor = Supervisor(
            world_size, self.now, missing=lambda call_id: self.waiting[call_id], **options
        )
        self.world_size = world_size
        self.quiet = set()
        self.busy = {}
        self.actions = []
        self.start = self.now
        if started:
            for rank in range(world_size):
                self.see("spawned", rank, 1000 + rank)
                self.see("ready", rank)

    def see(self, event, *args, **kwargs):
        self.take(getattr(self.supervisor, event)(*args, self.now, **kwargs))

    def take(self, actions):
        self.actions += [(round(self.now - self.start, 3), action) for action in actions]

    def run(self, seconds):
        """Let time pass as a monitor does: heartbeats, and ticks when they are due."""
        end = self.now + seconds
        beat = self.now
        while True:
            due = min(self.supervisor.next_tick(), beat, end)
            self.now = max(self.now, due)
            if self.now >= beat:
                beat = self.now + BEAT
                for rank in set(range(self.world_size)) - self.quiet:
                    since, call = self.busy.get(rank, (None, ""))
                    self.see("heard", rank, busy_since=since, call=call)
            if self.now >= self.supervisor.next_tick():
                self.see("tick")
                assert self.supervisor.next_tick() > self.now, "it would be asked without end"
            if self.now >= end:
                return

    def kinds(self):
        return [type(action) for _, action in self.actions]

    def only(self, kind):
        found = [each for each in self.actions if isinstance(each[1], kind)]
        assert len(found) == 1, self.actions
        return found[0]


def remote(rank, text="boom"):
    return RemoteError(text, rank=rank, type_name="ValueError", remote_traceback="")


def test_a_healthy_group_is_left_alone():
    group = Group()
    group.run(300)
    assert group.actions == []


def test_a_call_that_every_rank_acknowledges_belongs_to_itself_alone():
    group = Group()
    group.waiting[7] = {0, 2}
    group.see("erred", 1, 7, remote(1))
    group.run(0.5)
    group.waiting[7] = set()
    group.run(30)
    assert group.actions == []


def test_a_rank_that_does_not_acknowledge_fails_the_group_by_the_first_error():
    group = Group()
    group.waiting[7] = {0, 2}
    first = remote(1)
    group.see("erred", 1, 7, first)
    group.run(0.3)
    group.waiting[7] = {0}
    group.see("erred", 2, 7, remote(2, "a consequence"))
    group.run(0.6)
    assert group.actions == []
    group.run(0.2)
    when, fail = group.only(Fail)
    assert when == pytest.approx(1.0, abs=0.01)
    assert type(fail.error) is ExecutorFailedError
    assert fail.error.__cause__ is first
    assert "boom" in str(fail.error)
    assert "[0]" in str(fail.error)
    assert group.kinds() == [Fail, EndCollectives]
    assert group.actions[1][1] == EndCollectives(ranks=(0, 1, 2), work=True)


def test_a_rank_that_does_not_leave_its_collective_is_killed():
    group = Group()
    group.waiting[7] = {0, 2}
    group.busy[0] = group.busy[2] = (group.now, "execute_model")
    group.see("erred", 1, 7, remote(1))
    group.run(1.5)
    del group.busy[2]
    group.run(5)
    when, kill = group.only(Kill)
    assert kill.rank == 0
    assert when == pytest.approx(2.0, abs=0.01)
    group.only(Fail)


def test_a_death_is_told_with_what_its_starter_says_of_it():
    group = Group()
    group.run(1)
    cause = RuntimeError("The actor died.\n\tpid: 7\nThe node was removed.\n")
    group.see("exited", 1, None, cause=cause)
    error = group.supervisor.failure
    assert error.__cause__ is cause
    assert str(error) == "worker rank 1 (pid 1001) ended: The node was removed."


def test_a_death_is_told_at_once_and_once():
    group = Group()
    group.run(1)
    group.see("exited", 1, -9, last_lines=("about to die",))
    assert group.kinds() == [Fail, EndCollectives]
    error = group.supervisor.failure
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid, error.exit) == (1, 1001, -9)
    assert error.last_lines == ("about to die",)
    assert group.actions[1][1].ranks == (0, 2)
    group.see("exited", 1, -9)
    group.see("exited", 0, 1)
    group.quiet = {0, 1, 2}
    group.run(30)
    group.only(Fail)


def test_the_nursery_s_death_fails_the_group():
    group = Group()
    cause = ExecutorFailedError("the nursery is gone")
    group.see("failed", cause)
    assert group.only(Fail)[1].error is cause


def test_silence_is_no_death_until_silent_after_and_the_stack_is_asked_for_first():
    group = Group()
    group.run(1)
    group.quiet = {2}
    group.run(0.9)
    assert group.actions == []
    group.run(0.3)
    assert group.kinds() == [DumpStack]
    group.see("stack", 2, "Thread 1:\n  in forward\n")
    error = group.only(Fail)[1].error
    assert isinstance(error, WorkerSilentError)
    assert (error.rank, error.pid) == (2, 1002)
    assert "in forward" in str(error)
    assert group.only(Kill)[1].rank == 2
    assert group.kinds() == [DumpStack, Fail, EndCollectives, Kill]
    assert group.only(DumpStack)[1].last


def test_a_stack_that_cannot_be_had_is_not_waited_for():
    group = Group()
    group.quiet = {0}
    group.run(1.1 + STACK_WAIT)
    error = group.only(Fail)[1].error
    assert isinstance(error, WorkerSilentError)
    assert error.stack == ""
    group.see("stack", 0, "too late")
    group.only(Fail)


def test_a_silent_worker_that_ends_over_its_stack_was_silent_first():
    group = Group()
    group.quiet = {0}
    group.run(1.1)
    group.see("exited", 0, -40)
    assert isinstance(group.supervisor.failure, WorkerSilentError)


def test_a_worker_that_is_continued_for_its_stack_is_given_up_all_the_same():
    group = Group()
    group.quiet = {0}
    group.run(1.1)
    group.see("heard", 0)
    group.see("stack", 0, "here")
    assert isinstance(group.supervisor.failure, WorkerSilentError)


def test_busy_for_three_times_the_warning_interval_is_one_line_and_no_error():
    group = Group(warn_after=2.0)
    group.busy[1] = (group.now, "load_model")
    group.run(6)
    text = group.only(Warn)[1].text
    assert group.kinds() == [Warn]
    assert "rank 1" in text
    assert "1001" in text
    assert "load_model" in text
    group.busy[1] = (group.now, "execute_model")
    group.run(3)
    assert group.kinds() == [Warn, Warn]


def test_hang_after_gives_a_busy_worker_up_abort_first_kill_after():
    group = Group(hang_after=2.0)
    group.busy[1] = (group.now, "execute_model")
    group.run(2.1)
    assert group.kinds() == [DumpStack]
    assert not group.only(DumpStack)[1].last
    group.see("stack", 1, "in a loop")
    error = group.supervisor.failure
    assert isinstance(error, WorkerHungError)
    assert "'execute_model'" in str(error)
    assert "in a loop" in str(error)
    assert group.kinds() == [DumpStack, Fail, EndCollectives]
    group.run(0.5)
    assert Kill not in group.kinds()
    group.run(1)
    assert group.only(Kill)[1].rank == 1


def test_a_stopped_worker_that_is_over_its_time_is_not_let_on():
    group = Group(hang_after=2.0, silent_after=60.0)
    group.busy[1] = (group.now, "execute_model")
    group.run(1)
    group.quiet = {1}
    group.run(1.1)
    assert group.kinds() == [DumpStack]
    assert group.only(DumpStack)[1].last
    group.see("heard", 1)  # continued for its stack
    group.see("exited", 1, -40)
    assert isinstance(group.supervisor.failure, WorkerHungError)
    assert group.kinds() == [DumpStack, Fail, EndCollectives, Kill]


def test_a_worker_that_moves_on_while_its_stack_is_fetched_is_not_given_up():
    group = Group(hang_after=2.0)
    group.busy[1] = (group.now, "execute_model")
    group.run(2.1)
    group.busy.clear()
    group.run(0.2)
    group.see("stack", 1, "somewhere")
    group.run(10)
    assert group.kinds() == [DumpStack]


def test_the_start_has_a_deadline_that_counts_time_without_progress():
    group = Group(2, started=False, start_timeout=10.0)
    group.quiet = {0, 1}
    for stage in ("imports", "plugins", "worker"):
        group.run(9)
        group.see("progressed", 0, stage)
    group.see("ready", 1)
    group.quiet = {0}
    assert group.actions == []
    for _ in range(6):
        group.run(2)
        group.see("progressed", 0, "worker")  # no news
    error = group.only(Fail)[1].error
    assert isinstance(error, StartTimeoutError)
    assert error.stages == {0: "worker"}


def test_what_a_worker_could_not_be_built_for_is_the_first_cause():
    group = Group(2, started=False)
    cause = remote(0, "no such device")
    group.see("spawned", 0, 5)
    group.see("refused", 0, cause)
    group.see("exited", 0, 1)
    assert group.only(Fail)[1].error is cause


def test_the_driver_s_own_standstill_accuses_nobody():
    group = Group()
    group.run(1)
    group.now += 3600  # stopped, and continued
    group.see("tick")
    group.run(10)
    assert group.actions == []
    group.quiet = {0}
    group.run(1 + 2 * BEAT)
    assert group.kinds() == [DumpStack]


def test_what_ends_while_closing_ends_rightly():
    group = Group()
    group.waiting[7] = {0}
    group.see("erred", 1, 7, remote(1))
    group.supervisor.closing()
    group.see("erred", 2, 7, remote(2))
    group.see("exited", 0, 0)
    group.quiet = {0, 1, 2}
    group.run(10)
    assert group.actions == []


def test_suspects_are_bounded():
    group = Group()
    for call_id in range(1000):
        group.waiting[call_id] = {0}
        group.see("erred", 1, call_id, remote(1))
    group.run(1.1)
    group.only(Fail)


def test_the_call_table_tells_of_errors_and_of_who_is_missing():
    """What the supervisor is told of calls: nothing of those that go well."""
    table, told = CallTable(), []
    table.erred = lambda *args: told.append(args)
    call = Call(call_id=table.next_id(), generation=0, method="m")
    gather = table.open(call, 3)
    table.deliver(Reply(call_id=1, rank=0, generation=0, value=codec.pack(None, "v")))
    assert told == []
    assert table.missing(1) == [1, 2]
    failure = RemoteFailure.of(ValueError("boom"))
    table.deliver(Reply(call_id=1, rank=2, generation=0, failure=failure))
    [(rank, call_id, error)] = told
    assert (rank, call_id) == (2, 1)
    with pytest.raises(RemoteError) as caught:
        gather.future.result(0)
    assert caught.value is error
    assert table.missing(1) == [1]
    table.deliver(Reply(call_id=1, rank=1, generation=0, failure=failure))
    assert len(told) == 2
    assert table.missing(1) == []
    assert table.missing(7) == []


def test_of_several_busy_ranks_the_one_that_does_not_leave_is_blamed():
    group = Group(hang_after=2.0)
    for rank in range(3):
        group.busy[rank] = (group.now, "execute_model")
    group.run(2.1)
    assert group.kinds() == [EndCollectives]
    assert group.actions[0][1] == EndCollectives(ranks=(0, 1, 2), work=False)
    group.busy = {1: group.busy[1]}
    group.run(LEAVE_WAIT)
    assert group.kinds() == [EndCollectives, DumpStack]
    group.see("stack", 1, "in a kernel")
    error = group.supervisor.failure
    assert isinstance(error, WorkerHungError)
    assert error.rank == 1


def test_ranks_that_only_waited_for_each_other_are_given_up_together():
    group = Group(hang_after=2.0)
    for rank in range(3):
        group.busy[rank] = (group.now, "execute_model")
    group.run(2.1)
    group.busy.clear()
    group.run(LEAVE_WAIT + 0.1)
    assert group.kinds() == [EndCollectives, Fail, EndCollectives]
    assert "[0, 1, 2] waited for each other" in str(group.supervisor.failure)
    group.run(10)
    assert Kill not in group.kinds()


def test_a_shutdown_stops_looking_for_who_hangs():
    group = Group(hang_after=2.0)
    for rank in range(3):
        group.busy[rank] = (group.now, "execute_model")
    group.run(2.1)
    group.supervisor.closing()
    group.run(10)
    assert group.kinds() == [EndCollectives]
