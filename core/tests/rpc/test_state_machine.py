"""Anything in any order, to a simulated group, against a plain model of what may become of it.

What is shown (whatever hypothesis does): no call ends twice or by another's answer, no other
generation is heard, every call has ended when the group has, a failure has a cause that was really
done, and none without one. Hypothesis replays its own choices; the seed of the world is told too.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

from attrs import define, field
from hardpoint.errors import (
    CallTimeoutError,
    ExecutorFailedError,
    RemoteError,
    WorkerDiedError,
    WorkerSilentError,
)
from hardpoint.messages import SchedulerOutput
from hardpoint.simulation.executor import World
from hardpoint.simulation.network import CALLS, CONTROL, Weather
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)


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
SIZE = 3
RANKS = st.integers(0, SIZE - 1)
TIMEOUTS = st.sampled_from([None, 0.001, 0.05, 2.0])
METHODS = {
    "answer": simulated.answer,
    "meet": simulated.meet,
    "err": simulated.err,
    "err_or_meet": simulated.err_or_meet,
}
SLOW = (1e-5, 0.04)
WEATHERS = [
    Weather(),
    Weather(delay=SLOW),
    Weather(delay=SLOW, in_order=False),
    Weather(doubling=0.3),
    Weather(loss=0.2),
    Weather(delay=SLOW, loss=0.1, doubling=0.2, in_order=False),
]
GIVEN_UP = 1.2
"""Seconds within which the supervisor gives a stopped worker up: silence, its stack, some beats."""


@define
class Asked:
    """A call as the model knows it."""

    number: int
    kind: str
    generation: int
    reply_rank: int | None
    timeout: float | None
    raising: tuple[int, ...]
    ends: list[str | None] = field(factory=list)
    """What was wrong with each of its ends: one None if it ended rightly and once."""


@define
class Harm:
    """What was done to one generation."""

    killed: dict[int, float] = field(factory=dict)
    stopped: dict[int, float] = field(factory=dict)
    hurt: set[int] = field(factory=set)
    """Ranks that were ever stopped or cut off."""
    rough: bool = False
    """Whether the weather was ever such that ranks may miss calls or see them in other orders."""
    divided: bool = False
    """Whether some ranks raised while others waited for them."""


class Machine(RuleBasedStateMachine):
    """One driver after the other, in one world."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        note(f"seed {seed}")
        self.world = World(seed)
        self.world.work.meetings |= {"meet", "err_or_meet"}
        self.expect = self.world.simulation.expect
        self.asked = {}
        self.futures = {}
        self.executors = []
        self.harm = []
        self.steps = 0
        self.restart()

    # What is done.

    def restart(self):
        self.group = simulated.start(self.world, SIZE)
        self.executors.append(self.group)
        self.harm.append(Harm())
        self.world.network.cut.clear()

    @property
    def now(self):
        return self.world.simulation.now

    @property
    def harmed(self):
        return self.harm[self.group.generation]

    @property
    def over(self):
        return self.group.failure is not None or self.group._closed

    def ask(self, kind, reply_rank, timeout, raising, non_block):
        call = Asked(
            number=len(self.asked),
            kind=kind,
            generation=self.group.generation,
            reply_rank=reply_rank,
            timeout=timeout,
            raising=raising,
        )
        args = (call.number, raising) if kind.startswith("err") else (call.number,)
        if kind == "err_or_meet" and 0 < len(raising) < SIZE:
            self.harmed.divided = True
        method = METHODS[kind]
        options = {"args": args, "reply_rank": reply_rank, "timeout": timeout}
        try:
            result = self.group.collective_rpc(method, non_block=non_block, **options)
        except Exception as error:
            refused = isinstance(error, ExecutorFailedError)
            self.expect(not refused or self.over, f"it was refused by a living group: {error}")
            if not (refused and non_block):
                self.asked[call.number] = call
                call.ends.append(wrong_with(call, None, error))
            return
        self.asked[call.number] = call
        if non_block:
            self.futures[call.number] = result
            result.add_done_callback(partial(self.ended, call))
        else:
            call.ends.append(wrong_with(call, result, None))

    def ended(self, call, future):
        if future.cancelled():
            call.ends.append(None)
            return
        error = future.exception(0)
        call.ends.append(wrong_with(call, None if error else future.result(0), error))

    @rule(
        kind=st.sampled_from(sorted(METHODS)),
        reply_rank=st.none() | RANKS,
        timeout=TIMEOUTS,
        raising=st.sets(RANKS).map(lambda ranks: tuple(sorted(ranks))),
    )
    def call(self, kind, reply_rank, timeout, raising):
        self.ask(kind, reply_rank, timeout, raising, non_block=True)

    @rule(kind=st.sampled_from(sorted(METHODS)), raising=st.sampled_from([(), (1,), (0, 1, 2)]))
    def wait(self, kind, raising):
        self.ask(kind, None, 1.0, raising, non_block=False)

    @rule()
    def step(self):
        self.steps += 1
        call = Asked(
            number=len(self.asked),
            kind="step",
            generation=self.group.generation,
            reply_rank=self.group.output_rank,
            timeout=None,
            raising=(self.steps,),
        )
        try:
            plan = SchedulerOutput(step_id=self.steps)
            future = self.group.execute_model(plan, non_block=True)
        except ExecutorFailedError:
            self.expect(self.over, "a step was refused by a living group")
            return
        self.asked[call.number] = call
        self.futures[call.number] = future
        future.add_done_callback(partial(self.ended, call))

    @precondition(lambda self: self.futures)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.futures)))
        self.futures[number].cancel()

    @rule(rank=RANKS)
    def kill(self, rank):
        if self.group.workers[rank].alive:
            self.harmed.killed[rank] = self.now
            self.group.workers[rank].kill()

    @rule(rank=RANKS)
    def stop(self, rank):
        self.harmed.hurt.add(rank)
        self.harmed.stopped.setdefault(rank, self.now)
        self.group.workers[rank].stop()

    @rule(index=st.integers(0, 30))
    def go_on(self, index):
        """Any worker that ever was: one of a former generation, too."""
        workers = self.world.workers
        worker = workers[index % len(workers)]
        if worker.stopped:
            self.harm[worker.generation].stopped.pop(worker.rank, None)
            worker.go_on()

    @rule(rank=RANKS)
    def cut_off(self, rank):
        self.harmed.hurt.add(rank)
        self.world.network.cut.add(f"rank {rank}")

    @rule()
    def heal(self):
        self.world.network.cut.clear()

    @rule(weather=st.sampled_from(WEATHERS))
    def weather(self, weather):
        self.world.network.weather = {CALLS: weather, CONTROL: weather}
        self.harmed.rough |= bool(weather.loss or weather.doubling or not weather.in_order)

    @rule(seconds=st.sampled_from([0.0001, 0.004, 0.02, 0.3, 2.0]))
    def time_passes(self, seconds):
        self.world.simulation.advance(seconds)

    @rule(kind=st.sampled_from(["answer", "err"]), seconds=st.sampled_from([0.3, 1.5]))
    def many(self, kind, seconds):
        """What every rank acknowledges, be it by an error, harms nobody."""
        for _ in range(4):
            self.ask(kind, None, None, (0, 1, 2), non_block=True)
        self.world.simulation.advance(seconds)

    @rule()
    def start_anew(self):
        self.world.network.weather = {CALLS: Weather(), CONTROL: Weather()}
        self.world.network.cut.clear()
        self.group.shutdown()
        self.restart()

    @rule(busy=st.integers(0, 6))
    def start_beside(self, busy):
        """A successor at the same addresses, while its predecessor is stopped in its work; then
        that goes on.
        """
        self.world.network.weather = {CALLS: Weather(), CONTROL: Weather()}
        self.world.network.cut.clear()
        self.world.simulation.advance(0.1)  # what was slow comes before
        for _ in range(busy):
            self.ask("answer", None, None, (), non_block=True)
        self.world.simulation.advance(0.0003)
        former = self.group.workers
        for worker in former:
            self.harmed.hurt.add(worker.rank)
            worker.stop()
        self.restart()
        for _ in range(4):
            self.ask("answer", None, None, (), non_block=True)
        for worker in former:
            self.harm[worker.generation].stopped.pop(worker.rank, None)
            worker.go_on()

    @rule()
    def shut_down(self):
        self.group.shutdown()
        self.group.shutdown()

    # What holds.

    @invariant()
    def every_end_is_its_own_and_the_only_one(self):
        for call in getattr(self, "asked", {}).values():
            self.expect(len(call.ends) <= 1, f"call {call.number} ended {len(call.ends)} times")
            self.expect(call.ends in ([], [None]), f"call {call.number}: {call.ends}")

    @invariant()
    def a_failed_or_closed_group_leaves_nothing_pending(self):
        for executor in getattr(self, "executors", ()):
            if executor.failure is not None or executor._closed:
                left = [
                    number
                    for number, future in self.futures.items()
                    if self.asked[number].generation == executor.generation and not future.done()
                ]
                self.expect(not left, f"calls {left} are pending in a group that is over")
                self.expect(executor.calls.pending == 0, "its table holds calls")

    @invariant()
    def a_failure_has_a_cause_that_was_done(self):
        for executor in getattr(self, "executors", ()):
            failure, harm = executor.failure, self.harm[executor.generation]
            if isinstance(failure, WorkerDiedError):
                self.expect(failure.rank in harm.killed, f"nobody killed {failure.rank}: {failure}")
            elif isinstance(failure, WorkerSilentError):
                lossy = harm.rough or failure.rank in harm.hurt
                self.expect(lossy, f"rank {failure.rank} was not silent: {failure}")
            elif failure is not None:
                self.expect(isinstance(failure.__cause__, RemoteError), f"no cause: {failure!r}")
                possible = harm.divided or harm.rough or harm.hurt or harm.killed
                self.expect(possible, f"everybody acknowledged: {failure}")

    @invariant()
    def what_was_done_is_found_within_its_bound(self):
        for executor in getattr(self, "executors", ()):
            if executor.failure is not None or executor._closed:
                continue
            harm = self.harm[executor.generation]
            for rank, when in harm.killed.items():
                late = self.now - when
                self.expect(late < 0.006, f"the death of {rank} is not known after {late} s")
            for rank, when in harm.stopped.items():
                late = self.now - when
                self.expect(late < GIVEN_UP, f"the stop of {rank} is not known after {late} s")

    def teardown(self):
        if not hasattr(self, "executors"):
            return
        self.world.network.weather = {CALLS: Weather(), CONTROL: Weather()}
        for executor in self.executors:
            executor.shutdown()
        self.every_end_is_its_own_and_the_only_one()
        self.a_failed_or_closed_group_leaves_nothing_pending()
        for call in self.asked.values():
            self.expect(call.ends == [None], f"call {call.number} ({call.kind}) has no end")
        self.expect(not any(each.alive for each in self.world.workers), "workers are left")


def wrong_with(call, value, error):
    """Return what is wrong with this end of ``call``, or None."""
    if error is None:
        if call.kind == "step":
            (step,) = call.raising
            return None if value.step_id == step else f"step {step} got that of {value.step_id}"
        everything = [(call.number, rank, call.generation) for rank in range(SIZE)]
        wanted = everything if call.reply_rank is None else everything[call.reply_rank]
        raised = call.kind.startswith("err") and call.raising
        return f"it got {value}" if raised or value != wanted else None
    if isinstance(error, CallTimeoutError):
        return None if call.timeout is not None else "it timed out without a timeout"
    if isinstance(error, RemoteError):
        cause = error.__cause__
        if type(cause).__name__ == "CancelledStepError":
            return None if call.kind in ("meet", "err_or_meet") else f"it was cancelled: {error}"
        own = isinstance(cause, ValueError) and cause.args == (
            call.number, error.rank, call.generation,
        )  # fmt: skip
        return None if own and error.rank in call.raising else f"it got {error!r}"
    return None if isinstance(error, ExecutorFailedError) else f"it got {error!r}"


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_anything_in_any_order = Machine.TestCase
