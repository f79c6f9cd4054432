"""The fault matrix on actors: what is done to one, when, and what must follow."""

from __future__ import annotations

import os
import re
import time

import pytest
from hardpoint.errors import (
    RemoteError,
    WorkerDiedError,
    WorkerHungError,
    WorkerSilentError,
)
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.slow]

NOTICED = 2.0
"""Seconds from an actor's end to the error, on a machine with nothing beside."""
TRIES = 3
KEYS = {
    "load_format": "dummy",
    "block_size": 4,
    "max_model_len": 64,
    "plugins.dummy.silent_after": 10.0,
    "plugins.ray.hang_after": 3.0,
    "rpc.heartbeat": 0.2,
}
CELLS = [
    (1, "kill", "build", WorkerDiedError),
    (1, "kill", "load", WorkerDiedError),
    (1, "kill", "step", WorkerDiedError),
    (1, "exit", "step", WorkerDiedError),
    (1, "stop", "step", WorkerSilentError),
    (1, "hang", "step", WorkerHungError),
    (1, "raise", "build", RemoteError),
    (1, "raise", "step", RemoteError),
    (1, "memory_error", "step", RemoteError),
    (0, "kill", "load", WorkerDiedError),
    (0, "kill", "step", WorkerDiedError),
    (0, "stop", "step", WorkerSilentError),
    (0, "hang", "step", WorkerHungError),
    (0, "raise", "step", RemoteError),
]
"""The rank that it is done to, what, when, and the error that must follow."""


def step(number):
    request = NewRequestData(
        req_id=f"r{number}",
        prompt=(5, 6, 7),
        block_ids=((1, 2),),
        sampling=SamplingParams(temperature=0, seed=1),
    )
    return SchedulerOutput(
        step_id=number, new=(request,), num_tokens={request.req_id: 3}, total_tokens=3
    )


def run(launcher, give_cache, executor, **keys):
    """Start, and execute two steps; return the executor and what the second one gave."""
    started = give_cache(launcher.start(executor=executor, **KEYS, **keys))
    started.execute_model(step(1))
    return started, started.execute_model(step(2))


def actors_below(pid):
    """Return the processes of workers among those that a process has started."""
    import psutil

    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if re.search("ray::(Worker_|WorkerActor|GraphActor)", " ".join(process.cmdline())):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("executor", "rank", "kind", "point", "expected"),
    [(name, *cell) for name in ("ray", "ray_legacy") for cell in CELLS],
)
def test_a_fault_on_one_rank(
    launcher, give_cache, executor, rank, kind, point, expected, eventually
):
    import ray
    from ray.exceptions import RayActorError

    free = ray.available_resources().get("dummy")
    assert actors_below(os.getpid()) == []
    fault = f"{point}:2@{rank}={kind}" if point == "step" else f"{point}@{rank}={kind}"
    with pytest.raises(expected) as caught:
        run(launcher, give_cache, executor, **{"plugins.dummy.fail_at": fault})
    error = caught.value
    assert error.rank == rank
    if expected is WorkerDiedError:
        assert isinstance(error.__cause__, RayActorError)
    if expected in (WorkerHungError, WorkerSilentError):
        assert "hardpoint_dummy" in str(error) + "".join(getattr(error, "__notes__", ()))
    if expected is RemoteError and point == "step":  # of that step alone
        (started,) = launcher.started
        assert started.execute_model(step(3)).step_id == 3
        assert len(started.check_health()) == 2
    for each in launcher.started:
        each.shutdown()
    eventually(lambda: ray.available_resources().get("dummy") == free)
    eventually(lambda: actors_below(os.getpid()) == [])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_an_actor_that_ray_kills_is_noticed_in_time_with_its_cause(
    launcher, give_cache, executor, rank
):
    import ray
    from ray.exceptions import ActorDiedError

    seconds = []
    for _ in range(TRIES):  # with much beside, the machine may take longer once
        started = give_cache(launcher.start(executor=executor, **KEYS))
        started.execute_model(step(1))
        held = started.collective_rpc(sleep, args=(1000,), non_block=True)
        began = time.monotonic()
        ray.kill(started._resources.nursery._actors[rank].handle)
        error = held.exception(60)
        seconds.append(time.monotonic() - began)
        assert isinstance(error, WorkerDiedError)
        assert error.rank == rank
        assert isinstance(error.__cause__, ActorDiedError)
        started.shutdown()
        if min(seconds) < NOTICED:
            return
    raise AssertionError(f"noticed after {seconds} s")


def sleep(worker, seconds):
    time.sleep(seconds)
