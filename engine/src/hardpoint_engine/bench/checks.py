"""Figures of ``mp`` that are not the time of a call, each taken in processes of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import frozen
from hardpoint.errors import HardpointError

CHECK_SECONDS = 180.0

Figures = dict[str, float]


@frozen(kw_only=True)
class CheckPlan:
    """How often each is repeated."""

    kills: int = 5
    steps: int = 300
    starts: int = 3
    first_steps: int = 2


QUICK_CHECKS = CheckPlan(kills=2, steps=60, starts=1, first_steps=1)


def measure_checks(plan: CheckPlan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the named figures; ``left_out`` has why one could not be taken. Called by the command.

    ``sigkill_noticed_ms``: from the signal to one of two workers until a call that waits for it
    raises, and until the failure callback is called, whichever is later; ``_worst_`` of all.
    ``bubble_us``: how long a worker that is busy for 5 ms a step waits between two steps, with two
    in flight; ``bubble_2_workers_us`` the same of the worse one of two. ``torch_workers_ready_s``:
    starting 8 workers of the cpu platform, the nursery being up. ``first_step_X_s``: engine, model
    and one token of the default model on the cpu, by one worker in the driver's process and by two
    tensor shards.
    """
    found: dict[str, Any] = {"left_out": {}}
    stages: Mapping[str, Callable[[], Figures]] = {
        "sigkill_noticed_ms": partial(_noticed, plan.kills),
        "bubble_us": partial(_bubbles, plan.steps),
        "torch_workers_ready_s": partial(_ready, plan.starts),
        "first_step_s": partial(_first_steps, plan.first_steps),
    }
    for name, stage in stages.items():
        tell(f"check: {name}")
        try:
            found |= stage()
        except HardpointError as error:
            found["left_out"][name] = str(error)
    return found


def _noticed(times: int) -> Figures:
    seconds = [take("kill") for _ in range(times)]
    return {
        "sigkill_noticed_ms": round(1e3 * statistics.median(seconds), 3),
        "sigkill_noticed_worst_ms": round(1e3 * max(seconds), 3),
    }


def _bubbles(steps: int) -> Figures:
    found: Figures = {}
    for workers, name in ((1, "bubble"), (2, "bubble_2_workers")):
        median, worst = take("bubble", f"{workers},{steps}")
        found[f"{name}_us"] = round(median, 1)
        found[f"{name}_p99_us"] = round(worst, 1)
    return found


def _ready(times: int) -> Figures:
    seconds = [take("ready") for _ in range(times)]
    return {"torch_workers_ready_s": round(statistics.median(seconds), 4)}


def _first_steps(times: int) -> Figures:
    uni, mp = [], []
    for _ in range(times):
        uni.append(take("first-step", "uni,1"))
        mp.append(take("first-step", "mp,2"))
    one, two = statistics.median(uni), statistics.median(mp)
    return {
        "first_step_uni_s": round(one, 3),
        "first_step_mp_s": round(two, 3),
        "first_step_ratio": round(two / one, 3),
    }


def take(name: str, argument: str = "") -> Any:
    """Take one figure in a fresh process. Raises HardpointError with its last lines."""
    command = [sys.executable, "-P", "-m", "hardpoint_engine.bench.check_process", name, argument]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this module
            command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise HardpointError(f"it took longer than {CHECK_SECONDS:g} s") from None
    if done.returncode != 0:
        raise HardpointError("\n".join(done.stderr.strip().splitlines()[-3:]) or "it failed")
    return json.loads(done.stdout.splitlines()[-1])
