"""The executor in a simulated world: what is rare outside is made to happen here, by seed."""

from __future__ import annotations

import importlib.util
import itertools
import sys
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


def storm(seed, calls=200):
    """``calls`` random calls in bad weather; return the world. Raises SimulationError if an answer
    is not that of its call, or if a call does not end exactly once.
    """
    world, random = World(seed, silent_after=5.0), Random(seed)
    world.work.meetings |= {"meet"}
    simulation = world.simulation
    group = simulated.start(world)
    world.network.weather = {
        CALLS: Weather(delay=(1e-5, 0.02), loss=0.05, doubling=0.1, in_order=False),
        CONTROL: Weather(delay=(1e-5, 0.02), loss=0.1, doubling=0.1, in_order=False),
    }
    world.work.usual = (1e-5, 0.03)
    ends, failed_by = [], []

    def judge(number, kind, reply_rank, future):
        ends.append(number)
        error = future.exception(0)
        if error is None:
            everything = [(number, rank, 0) for rank in range(3)]
            wanted = everything if reply_rank is None else everything[reply_rank]
            got = future.result(0)
            simulation.expect(kind != "err" and got == wanted, f"call {number} got {got}")
        elif isinstance(error, RemoteError) and kind == "err":
            token, rank, generation = error.__cause__.args
            simulation.expect(
                (token, rank, generation) == (number, error.rank, 0), f"{number} got {error}"
            )
        else:
            simulation.expect(
                isinstance(error, CallTimeoutError | ExecutorFailedError), f"{number}: {error!r}"
            )
            failed_by.append(type(error))

    for number in range(calls):
        kind, reply_rank = random.choice(["answer", "err", "meet"]), random.choice([None, 0, 2])
        method, args = {
            "answer": (answer, (number,)),
            "meet": (meet, (number,)),
            "err": (err, (number, (0, 1, 2))),
        }[kind]
        options = {"args": args, "reply_rank": reply_rank, "timeout": random.choice([0.01, 0.1, 1])}
        future = group.collective_rpc(method, non_block=True, **options)
        future.add_done_callback(lambda done, n=number, k=kind, r=reply_rank: judge(n, k, r, done))
        if random.random() < 0.3:
            simulation.advance(random.uniform(0, 0.1))
        if group.failure is not None:
            break
    world.network.weather = {CALLS: Weather(), CONTROL: Weather()}
    simulation.advance(3)
    group.shutdown()
    simulation.expect(sorted(ends) == list(range(number + 1)), f"ends of calls: {ends}")
    simulation.expect(not any(each.alive for each in world.workers), "workers are left")
    return world, failed_by, number + 1


def test_two_hundred_calls_in_bad_weather_end_once_each_with_their_own():
    made = lost = doubled = 0
    for seed in range(12):
        world, _, calls = storm(seed)
        made += calls
        lost += world.network.lost
        doubled += world.network.doubled
    assert made > 200
    assert lost > 20
    assert doubled > 20


def test_a_seed_replays_its_run():
    world, errors, _ = storm(5)
    again, errors_again, _ = storm(5)
    assert world.simulation.trace == again.simulation.trace
    assert errors == errors_again
    assert storm(6)[0].simulation.trace != world.simulation.trace


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
