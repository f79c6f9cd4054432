"""Sleep and waking: what is freed, what comes back, and the states between."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hardpoint.capabilities import YES, Capability
from hardpoint.errors import HardpointError
from hardpoint.messages import SchedulerOutput
from hardpoint.records import SleepReport
from hardpoint.sleep import SleepStateError
from hardpoint.worker import Worker

from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.sleep_model import TAGS, SleepModel
from hardpoint_conformance.suite import needs, own_workers
from hardpoint_conformance.worker.part import PROMPT, WorkerPart


class SleepTests(WorkerPart):
    """By the reports, the probe, and a model of the states."""

    @own_workers
    @needs(Capability.SLEEP)
    @pytest.mark.parametrize("level", [1, 2])
    def test_sleep_frees_and_waking_brings_all_back(self, level: int) -> None:
        """By the reports, by the probe, and by what comes out afterwards."""
        bench = Bench(self.subject, self.subject.ready())
        group = bench.executor
        before = bench.steps.alone(PROMPT, 6, self.scored()).output
        held = self.held(group)
        reports = group.sleep(level)
        weights = sum(report.weight_bytes for report in group.load_reports)
        freed = sum(report.bytes_freed for report in reports)
        expect(
            all(isinstance(report, SleepReport) for report in reports) and freed >= weights,
            "sleep frees the memory of weights and KV cache and reports the bytes",
            seen=f"{freed} bytes freed, the weights alone had {weights}", where=Worker.sleep,
            do="Give the memory back to the device, and report the allocator's account.",
        )  # fmt: skip
        asleep = self.held(group)
        if held is not None and asleep is not None:
            expect(
                held - asleep >= weights, "what sleeps holds no device memory",
                seen=f"{held} bytes before, {asleep} asleep, weights of {weights}",
                where=Worker.sleep, do="Drop or move every tensor, then empty the cache.",
            )  # fmt: skip
        group.wake_up()
        if level == 2:
            expect_raises(
                SleepStateError, lambda: group.execute_model(SchedulerOutput(step_id=99)),
                "weights that were dropped are undefined until they are loaded again",
                where=Worker.sleep, do="Leave the state to the base class.",
            )  # fmt: skip
            group.reload_weights()
        after = bench.steps.alone(PROMPT, 6, self.scored())
        bench.check_greedy(after, f"after sleep({level}) and waking")
        if after.logprobs:
            bench.check_scores(after, f"after sleep({level}) and waking")
        expect_equal(
            after.output, before, "waking brings back what slept", where=Worker.wake_up,
            do="Restore every buffer, those of modules too.",
        )  # fmt: skip
        self.subject.end(group)

    @own_workers
    @needs(Capability.SLEEP)
    def test_sleep_follows_its_state_machine(self) -> None:
        """Sixty calls at random, beside a model of the states."""
        bench = Bench(self.subject, self.subject.ready())
        group, model = bench.executor, SleepModel()
        rng = random.Random(3)  # noqa: S311 - a history, not a secret
        reload = self.subject.support(Capability.WEIGHT_RELOAD) is YES
        history = []
        for _ in range(60):
            name = rng.choice(["sleep", "wake_up", "wake_up", "discard", "reload_weights", "step"])
            if name == "reload_weights" and not reload:
                continue
            argument = {
                "sleep": rng.choice([1, 2] if reload else [1]),
                "wake_up": tuple(rng.sample(TAGS, rng.randint(1, 2))),
                "discard": tuple(rng.sample(TAGS if reload else TAGS[1:], 1)),
            }.get(name)
            history.append(f"{name}({argument or ''})")
            self._move(bench, model, name, argument, history)
            expect_equal(
                group.sleeping_tags, model.sleeping,
                "each tag is awake or asleep as the calls before say", where=SleepStateError,
                do=f"After {' '.join(history[-6:])}: raise where a change failed.",
            )  # fmt: skip
        self.subject.end(group)

    def _move(
        self, bench: Bench, model: SleepModel, name: str, argument: Any, history: list[str]
    ) -> None:
        group = bench.executor
        allowed = True
        if name == "sleep":
            allowed = model.sleep(argument)
        elif name == "wake_up":
            model.wake(argument)
        elif name == "discard":
            model.discard(argument)
        elif name == "reload_weights":
            allowed = model.reload()
        elif model.can_execute:
            bench.check_greedy(bench.steps.alone(PROMPT, 2), f"after {' '.join(history[-6:])}")
            return
        else:
            allowed = False
            name, argument = "execute_model", SchedulerOutput(step_id=10_000 + len(history))

        def act() -> Any:
            method = getattr(group, name)
            return method() if argument is None else method(argument)

        if allowed:
            act()
        else:
            expect_raises(
                HardpointError, act, f"{history[-1]} is refused in the state that "
                f"{' '.join(history[-6:-1])} leads to", where=Worker.sleep,
                do="Leave the states to WorkerHost and the base class of Executor.",
            )  # fmt: skip

    @own_workers
    @needs(Capability.SLEEP)
    def test_a_part_sleeps_alone(self) -> None:
        """The cache without a backup, the weights untouched."""
        bench = Bench(self.subject, self.subject.ready())
        group = bench.executor
        group.discard(["kv_cache"])
        expect_equal(
            group.sleeping_tags, {"kv_cache"}, "discard frees the tags that it is given",
            where=Worker.discard, do="Free those alone.",
        )  # fmt: skip
        group.wake_up(["kv_cache"])
        bench.check_greedy(bench.steps.alone(PROMPT, 4), "after the KV cache was discarded")
        self.subject.end(group)
