"""The processes of the engines of ``hardpoint bench cpu``, and who has its turn when."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Self

from hardpoint_engine.bench.driver import HERE, Driver, TransportFailedError, TransportMissingError

if TYPE_CHECKING:
    from hardpoint_engine.bench.cpu import Case, CpuPlan, Runner

PATIENCE: Final = 900.0
"""Seconds for any order: some compile for minutes."""
HOPELESS: Final = 5.0
"""Who took so many times as long as the fastest of its rivals has no further turn in that case."""
THE_TIME: Final = "minutes"
"""What :attr:`Race.cut` says when the time was up."""

Tell = Callable[[str], None]
Times = dict["Runner", dict[str, list[float]]]
"""Runner -> case -> seconds of each turn that counts."""


class Race:
    """Started by :meth:`start` and run once, in a ``with`` block that ends every process.
    ``skipped`` gets who fails.
    """

    def __init__(
        self, plan: CpuPlan, cases: Mapping[str, Case], skipped: dict[str, str], tell: Tell
    ) -> None:
        self._plan, self._cases, self._skipped, self._tell = plan, cases, skipped, tell
        self._drivers: dict[Runner, Driver] = {}
        self._opened = time.monotonic()
        self._ran = self._idle = 0.0
        self.times: Times = {}
        self.turns = 0
        self.cut: str | None = None
        self.once: list[dict[str, str]] = []

    def start(self, wanted: Iterable[Runner], files: Mapping[str, str]) -> None:
        """Start one after the other: starting takes cores, too. ``files``: engine -> its file."""
        for runner in wanted:
            self._tell(f"starting {runner.name}")
            script = HERE / "serving_engines" / files[runner.engine]
            try:
                driver = self._drivers[runner] = Driver(
                    runner.name,
                    self._plan.peers.get(runner.engine, sys.executable),
                    script=(str(HERE / "serving_turns.py"), str(script), runner.arguments),
                    environ={"OMP_NUM_THREADS": str(self._plan.threads)},
                    patience=PATIENCE,
                )
                driver.opened()
                driver.settle()
            except (TransportMissingError, TransportFailedError) as error:
                self._leave_out(runner, error)
        if not self._ours():
            raise TransportFailedError(f"our engine ran in no format: {self._skipped}")

    def run(self) -> None:
        """Take every turn, there and back, until all are taken, the time is up or a signal comes:
        :attr:`cut` tells which.
        """
        self.times = {runner: {} for runner in self._drivers}
        try:
            for name in self._cases:
                self._tell(f"warm-up, {name}")
                for runner in tuple(self._drivers):
                    self._turn(runner, self._cases[name].warm_up, 0)
            for repeat in range(1, self._plan.repeats + 1):
                for name in self._cases:
                    self._tell(f"turn {repeat}, {name}")
                    if not self._all(name, repeat):
                        return
                self.turns = repeat
        except KeyboardInterrupt as signal:
            if not any(self.times.values()):
                raise
            self.cut = str(signal) or "SIGINT"
            self._tell(f"{self.cut}: the turns that there were count")
            self._end(at_once=True)

    def _all(self, name: str, repeat: int) -> bool:
        """Give everyone a turn in a case; return False if there is no time for the next one."""
        order = [runner for runner in self._drivers if self._has_hope(runner, name)]
        for runner in order if repeat % 2 else order[::-1]:
            before = self.times[runner].get(name, ())
            if repeat > 1 and before and self._is_late(before[-1]):
                self.cut = THE_TIME
                self._tell("the time is up: the turns that there were count")
                return False
            seconds = self._turn(runner, self._cases[name], repeat)
            if seconds is not None:
                self.times[runner].setdefault(name, []).append(seconds)
        if repeat == 1:
            self._name_hopeless(name)
        return True

    def _is_late(self, seconds: float) -> bool:
        if self._plan.minutes is None:
            return False
        return time.monotonic() + seconds > self._opened + 60 * self._plan.minutes

    def _has_hope(self, runner: Runner, name: str) -> bool:
        mine = self.times[runner].get(name)
        if not mine:
            return True
        best = min(
            min(found[name])
            for other, found in self.times.items()
            if other.rivals == runner.rivals and found.get(name)
        )
        return min(mine) <= HOPELESS * best

    def _name_hopeless(self, name: str) -> None:
        for runner in self.times:
            if not self._has_hope(runner, name):
                why = f"took more than {HOPELESS:g} times as long as its engine at best"
                self.once.append({"name": runner.name, "case": name, "why": why})
                self._tell(f"{runner.name} {why}: it has no further turn in {name}")

    def figures(self, case: Case) -> dict[str, dict[str, float]]:
        """Return format -> what our engine knows of itself after one more turn, in ``case``."""
        found = {}
        for runner in self._ours():
            driver = self._drivers[runner]
            driver.tell("figures")
            self._turn(runner, case, self._plan.repeats + 1)
            found[runner.format] = driver.tell("figures")
        return found

    @property
    def idle_cpu_share(self) -> float | None:
        """Cores that those who had no turn used together while another had, on average."""
        return round(self._idle / self._ran, 4) if self._ran else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(at_once=kind is not None)

    def _turn(self, runner: Runner, case: Case, seed: int) -> float | None:
        driver = self._drivers.get(runner)
        if driver is None:
            return None
        others = [each for each in self._drivers.values() if each is not driver]
        used = sum(each.cpu_seconds() for each in others)
        shape = {"batch": case.batch, "length": case.length, "new": case.new}
        try:
            seconds = float(driver.tell("turn", seed=seed, **shape)["seconds"])
        except TransportFailedError as error:
            self._leave_out(runner, error)
            return None
        self._ran += seconds
        self._idle += sum(each.cpu_seconds() for each in others) - used
        if not driver.settle():
            self._tell(f"{runner.name} is not at rest after its turn")
        return seconds

    def _ours(self) -> list[Runner]:
        return [runner for runner in self._drivers if runner.is_ours]

    def _end(self, *, at_once: bool) -> None:
        """End every process, ``at_once``: whatever it is doing."""
        for driver in self._drivers.values():
            if at_once:
                driver.kill()
            else:
                driver.release()
        while self._drivers:
            self._drivers.popitem()[1].close()

    def _leave_out(self, runner: Runner, error: Exception) -> None:
        driver = self._drivers.pop(runner, None)
        if driver is not None:
            driver.close()
        self._skipped[runner.name] = str(error)
        self._tell(f"{runner.name} is left out: {error}")
