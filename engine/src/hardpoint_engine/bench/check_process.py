"""One figure, taken in this process alone: ``python -m hardpoint_engine.bench.check_process NAME
[ARGUMENT]`` prints it as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import HardpointError
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_executor, select_platform

from hardpoint_engine.bench.launching import PROCESS, WORK, Installed, start_dummy
from hardpoint_engine.llm import LLM

BUSY_SECONDS = 0.005
KILL_SECONDS = 2.0
"""Seconds for which the workers are busy when one is killed."""
NOTICE_SECONDS = 30.0
TORCH_WORKERS = 8
UNSETTLED = 5
"""Steps at the begin that do not count."""


def kill(_: str) -> float:
    """Return the seconds from SIGKILL of a worker until all who should know do."""
    with contextlib.closing(Installed()):
        core = start_dummy(2)
        heard = threading.Event()
        times: list[float] = []

        def note(error: BaseException) -> None:
            times.append(time.monotonic())
            heard.set()

        try:
            executor = core.executor
            executor.register_failure_callback(note)
            victim = executor.collective_rpc(PROCESS)[1]
            waiting = executor.collective_rpc(WORK, args=(KILL_SECONDS,), non_block=True)
            time.sleep(0.2)  # until all are in the call
            begin = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            error = waiting.exception(NOTICE_SECONDS)
            times.append(time.monotonic())
            if error is None or not heard.wait(NOTICE_SECONDS):
                raise HardpointError("the death of a worker went unnoticed")
            return max(times) - begin
        finally:
            core.shutdown()


def bubble(argument: str) -> tuple[float, float]:
    """Return median and 99th percentile of the worst worker's pause between two steps, in µs."""
    workers, steps = map(int, argument.split(","))
    with contextlib.closing(Installed()):
        core = start_dummy(workers)
        try:
            call = partial(core.executor.collective_rpc, WORK, args=(BUSY_SECONDS,), non_block=True)
            flying = deque((call(), call()))
            spans = []
            for _ in range(steps):
                spans.append(flying.popleft().result())
                flying.append(call())
            for each in flying:
                each.result()
        finally:
            core.shutdown()
    pauses = sorted(
        max(later[rank][0] - earlier[rank][1] for rank in range(workers)) / 1e3
        for earlier, later in itertools.pairwise(spans[UNSETTLED:])
    )
    return statistics.median(pauses), pauses[int(0.99 * (len(pauses) - 1))]


def ready(_: str) -> float:
    """Return the seconds that torch workers take to be ready, the nursery being up."""
    config = load_config(
        overrides={
            "model": "dummy",
            "load_format": "dummy",
            "platform": "cpu",
            "executor": "mp",
            "pipeline_parallel_size": TORCH_WORKERS,
        },
        environ={},
    )
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    executor_class = select_executor(registry, config, platform)
    config = resolution.structure_plugins(config, registry)
    executor = executor_class(config, registry, platform)
    prepared: Any = executor_class.prepare(config, registry, platform)
    executor.prepared = prepared
    try:
        if prepared is None or (problem := prepared.ready.result()):
            raise HardpointError(f"there is no nursery: {prepared and problem}")
        begin = time.monotonic()
        executor.start_workers()
        return time.monotonic() - begin
    finally:
        executor.shutdown()


def first_step(argument: str) -> float:
    """Return the seconds from nothing to the first token of the default model."""
    executor, shards = argument.split(",")
    begin = time.monotonic()
    with LLM(platform="cpu", executor=executor, tensor_parallel_size=int(shards)) as llm:
        llm.generate(["The capital of France is"], SamplingParams(max_tokens=1))
        return time.monotonic() - begin


CHECKS: Mapping[str, Callable[[str], object]] = {
    "kill": kill,
    "bubble": bubble,
    "ready": ready,
    "first-step": first_step,
}


def main(name: str, argument: str = "") -> int:
    """Take the figure ``name``; called in a fresh process. Returns its exit code."""
    try:
        found = CHECKS[name](argument)
    except HardpointError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
