"""The executor in a simulated world: what is rare outside is made to happen here, by seed."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hardpoint.errors import (
    CallTimeoutError,
    ExecutorFailedError,
    RemoteError,
    WorkerDiedError,
    WorkerSilentError,
)
from hardpoint.messages import SchedulerOutput
from hardpoint.simulation import clock
from hardpoint.simulation.clock import SimulationError
from hardpoint.simulation.executor import World
from hardpoint.simulation.network import CALLS, CONTROL, Weather


def _simulated():
    name = "core_tests_simulated"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("simulated.py")
        )
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


simulated = _simulated()
answer, meet, err, err_or_meet = (
    simulated.answer, simulated.meet, simulated.err, simulated.err_or_meet,
)  # fmt: skip


@pytest.fixture
def world():
    made = World(seed=1)
    made.work.meetings |= {"meet", "err_or_meet"}
    return made


@pytest.fixture
def group(world):
    made = simulated.start(world)
    yield made
    made.shutdown()
    assert not any(each.alive for each in world.workers)


def test_real_hosts_answer_over_simulated_delivery(world, group):
    assert group.collective_rpc(answer, args=("x",)) == [("x", rank, 0) for rank in range(3)]
    assert group.collective_rpc(meet, args=("y",), reply_rank=1) == ("y", 1, 0)
    assert group.execute_model(SchedulerOutput(step_id=4)).step_id == 4
    assert [health.step_id for health in group.check_health()] == [4, 4, 4]
    world.simulation.advance(60)
    assert group.failure is None


def test_a_timeout_is_of_its_call_alone(world, group):
    world.work.seconds["meet"] = (1.0, 1.0)
    begun = world.simulation.now
    with pytest.raises(CallTimeoutError, match=r"within 0\.3 s by ranks \[0, 1, 2\]"):
        group.collective_rpc(meet, args=("slow",), timeout=0.3)
    assert world.simulation.now - begun == pytest.approx(0.3)
    # A retry comes while the first still runs.
    assert group.collective_rpc(answer, args=("next",), timeout=5)[0] == ("next", 0, 0)
    assert group.calls.late_replies == 3


def test_an_error_of_all_belongs_to_its_call(world, group):
    with pytest.raises(RemoteError) as caught:
        group.collective_rpc(err, args=("e", (0, 1, 2)))
    assert isinstance(caught.value.__cause__, ValueError)
    world.simulation.advance(30)
    assert group.failure is None


def test_an_error_while_others_wait_reaches_the_caller_within_two_seconds(world, group):
    """B2: rank 0 shall reply and waits in a collective, rank 2 raises."""
    begun = world.simulation.now
    with pytest.raises(RemoteError) as caught:
        group.collective_rpc(err_or_meet, args=("e", (2,)), reply_rank=0)
    assert caught.value.rank == 2
    assert world.simulation.now - begun < 0.1
    first = caught.value
    world.simulation.advance(begun + 1.5 - world.simulation.now)
    assert isinstance(group.failure, ExecutorFailedError)
    assert group.failure.__cause__ is first
    with pytest.raises(ExecutorFailedError):
        group.check_health()
    assert all(each.alive for each in world.workers)  # their collectives were ended


def test_a_rank_that_does_not_leave_its_collective_is_killed(world, group):
    world.work.hangs.add(("err_or_meet", 0))
    with pytest.raises(RemoteError):
        group.collective_rpc(err_or_meet, args=("e", (2,)))
    world.simulation.advance(3)
    assert [each.alive for each in world.workers] == [False, True, True]


@pytest.mark.parametrize("busy", [True, False])
def test_a_death_fails_what_is_pending_at_once(world, group, busy):
    told = []
    group.register_failure_callback(told.append)
    future = group.collective_rpc(meet, args=("m",), non_block=True) if busy else None
    world.work.hangs.add(("meet", 0))
    group.workers[1].kill()
    world.simulation.advance(0.01)
    assert isinstance(group.failure, WorkerDiedError)
    assert (group.failure.rank, group.failure.exit) == (1, -9)
    assert told == [group.failure]
    if busy:
        assert future.exception(0) is group.failure


def test_a_stopped_worker_is_given_up_with_its_stack(world, group):
    begun = world.simulation.now
    group.workers[2].stop()
    world.simulation.run(lambda: group.failure is not None, begun + 5)
    assert isinstance(group.failure, WorkerSilentError)
    assert group.failure.stack == "stack of rank 2"
    assert world.simulation.now - begun == pytest.approx(world.silent_after, abs=0.12)
    assert not group.workers[2].alive


def test_a_short_stop_is_no_failure(world, group):
    group.workers[2].stop()
    world.simulation.advance(0.4)
    group.workers[2].go_on()
    world.simulation.advance(5)
    assert group.failure is None


def test_a_long_call_stays_healthy(world, group):
    world.work.seconds["meet"] = (100.0, 100.0)
    future = group.collective_rpc(meet, args=("m",), non_block=True)
    world.simulation.advance(99)
    assert [each.busy_since is not None for each in group.check_health()] == [True] * 3
    world.simulation.advance(2)
    assert future.result(0)[0] == ("m", 0, 0)
    assert len(group.warnings) == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_predecessor_is_never_heard(seed):
    """The old group listens and answers at the very addresses of the new one."""
    world = World(seed)
    world.work.meetings |= {"meet"}
    old = simulated.start(world)
    world.work.seconds["answer"] = (0.1, 0.2)
    futures = [old.collective_rpc(answer, args=("old",), non_block=True) for _ in range(8)]
    for worker in old.workers:
        worker.stop()
    new = simulated.start(world)
    for worker in old.workers:
        worker.go_on()
    for number in itertools.count():
        values = new.collective_rpc(answer, args=(number,), timeout=10)
        world.simulation.expect(
            values == [(number, rank, 1) for rank in range(3)], f"{number} was answered {values}"
        )
        if all(future.done() for future in futures) and number > 20:
            break
    for future in futures:  # the old driver is still there, and its answers are its own
        assert future.result(0) == [("old", rank, 0) for rank in range(3)]
    assert new.failure is None
    assert new.calls.late_replies > 0  # it did speak
    new.shutdown()
    old.shutdown()


FAIR = {CALLS: Weather(), CONTROL: Weather()}
LATE = {CALLS: Weather(delay=(1e-5, 0.01)), CONTROL: Weather(delay=(1e-5, 0.01))}
ROUGH = {
    CALLS: Weather(delay=(1e-5, 0.01), doubling=0.1, in_order=False),
    CONTROL: Weather(delay=(1e-5, 0.01), doubling=0.1, in_order=False),
}
LOSSY = {
    CALLS: Weather(delay=(1e-5, 0.01), loss=0.01, doubling=0.05, in_order=False),
    CONTROL: Weather(delay=(1e-5, 0.01), loss=0.05, doubling=0.05, in_order=False),
}


class Storm:
    """Random calls in bad weather, and what is wrong with how any of them ended."""

    def __init__(self, seed, weather):
        self.world, self.random = World(seed, silent_after=5.0), Random(seed)
        self.weather = weather
        # Ranks that hear of meetings in different orders, or twice, wait for each other for ever.
        self.kinds = ["answer", "err", "meet"] if weather is LATE else ["answer", "err"]
        self.world.work.meetings |= {"meet"}
        self.world.work.usual = (1e-5, 0.003)
        self.ends = []
        self.faults = []
        self.group = None

    def run(self, calls=200):
        for number in range(calls):
            if self.group is None or self.group.failure is not None:
                self.restart()
            self.call(number, self.random.choice(self.kinds), self.random.choice([None, 0, 2]))
            self.world.simulation.advance(self.random.choice([0, 0.002, 0.02, 0.2]))
        self.world.network.weather = FAIR
        self.world.simulation.advance(3)
        self.group.shutdown()
        expect = self.world.simulation.expect
        expect(not any(self.faults), f"{[fault for fault in self.faults if fault]}")
        numbers = sorted(number for number, _ in self.ends)
        expect(numbers == list(range(calls)), f"ends of calls: {numbers}")
        expect(not any(each.alive for each in self.world.workers), "workers are left")
        return self

    def restart(self):
        self.world.network.weather = FAIR
        if self.group is not None:
            self.group.shutdown()
        self.group = simulated.start(self.world)
        self.world.network.weather = self.weather

    def call(self, number, kind, reply_rank):
        method, args = {
            "answer": (answer, (number,)),
            "meet": (meet, (number,)),
            "err": (err, (number, (0, 1, 2))),
        }[kind]
        timeout = self.random.choice([0.002, 0.02, 1])
        options = {"args": args, "reply_rank": reply_rank, "timeout": timeout}
        future = self.group.collective_rpc(method, non_block=True, **options)
        generation = self.group.generation
        future.add_done_callback(partial(self.ended, number, kind, reply_rank, generation))

    def ended(self, number, kind, reply_rank, generation, future):
        self.ends.append((number, type(future.exception(0))))
        self.faults.append(fault_of(number, kind, reply_rank, generation, future))


def fault_of(number, kind, reply_rank, generation, future):
    """Return what is wrong with how call ``number`` ended, or None."""
    error = future.exception(0)
    if error is None:
        everything = [(number, rank, generation) for rank in range(3)]
        wanted = everything if reply_rank is None else everything[reply_rank]
        got = future.result(0)
        return None if kind != "err" and got == wanted else f"call {number} ({kind}) got {got}"
    if isinstance(error, RemoteError):
        mine = kind == "err" and error.__cause__.args == (number, error.rank, generation)
        return None if mine else f"call {number} ({kind}) got {error!r}"
    fine = isinstance(error, CallTimeoutError | ExecutorFailedError)
    return None if fine else f"call {number} ({kind}) got {error!r}"


@pytest.mark.parametrize("weather", [LATE, ROUGH, LOSSY], ids=["late", "rough", "lossy"])
def test_two_hundred_calls_in_bad_weather_end_once_each_with_their_own(weather):
    kinds, lost, doubled, restarts = Counter(), 0, 0, 0
    for seed in range(4):
        done = Storm(seed, weather).run()
        kinds.update(kind for _, kind in done.ends)
        lost += done.world.network.lost
        doubled += done.world.network.doubled
        restarts += done.world.generation
    expected = {type(None), RemoteError, CallTimeoutError}
    expected |= {ExecutorFailedError} if weather is LOSSY else set()
    assert set(kinds) == expected
    assert min(kinds[kind] for kind in (type(None), RemoteError, CallTimeoutError)) > 120, kinds
    assert doubled > 250 or weather is LATE
    assert (lost > 30 and restarts > 3) if weather is LOSSY else lost == restarts == 0


def test_a_seed_replays_its_run():
    first, again = Storm(5, LOSSY).run(), Storm(5, LOSSY).run()
    assert first.world.simulation.trace == again.world.simulation.trace
    assert first.ends == again.ends
    other = Storm(6, LOSSY).run()
    assert other.world.simulation.trace != first.world.simulation.trace


def test_a_failure_tells_its_seed_and_what_happened(world, group, monkeypatch):
    with pytest.raises(SimulationError, match=r"seed 1, at 0\.\d+ s: never so") as caught:
        world.simulation.expect(False, "never so")
    assert "answers call" in str(caught.value)
    world.work.hangs.add(("answer", 0))
    monkeypatch.setattr(clock, "LONGEST", 10.0)
    with pytest.raises(SimulationError, match=r"seed 1, .*never ends"):
        group.collective_rpc(answer, args=("x",))


def test_a_partition_is_silence(world, group):
    world.network.cut.add("rank 1")
    with pytest.raises((WorkerSilentError, CallTimeoutError)):
        group.collective_rpc(answer, args=("x",), timeout=2)
    assert isinstance(group.failure, WorkerSilentError)
    assert group.failure.rank == 1


def test_who_lives_of_a_failed_group_begins_nothing_more(world, group):
    world.work.seconds["answer"] = (0.1, 0.1)
    before = len(told_by(world, 0))
    futures = [group.collective_rpc(answer, args=(n,), non_block=True) for n in range(6)]
    world.simulation.advance(0.15)
    group.workers[1].kill()
    world.simulation.advance(3)
    assert [type(future.exception(0)) for future in futures[1:]] == [WorkerDiedError] * 5
    assert len(told_by(world, 0)) - before == 2, "what was begun, and nothing behind it"


def told_by(world, rank):
    return [
        line for line in world.simulation.trace if f"worker {rank} of" in line and "answers" in line
    ]
