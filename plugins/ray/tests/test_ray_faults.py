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
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheTensor
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
    ("kill", "build", WorkerDiedError),
    ("kill", "load", WorkerDiedError),
    ("kill", "step", WorkerDiedError),
    ("exit", "step", WorkerDiedError),
    ("stop", "step", WorkerSilentError),
    ("hang", "step", WorkerHungError),
    ("raise", "build", RemoteError),
    ("raise", "step", RemoteError),
    ("memory_error", "step", RemoteError),
]


def plans(executor):
    made = []
    for specs in executor.get_kv_cache_specs():
        spec = next(iter(specs.values()))
        tensors = tuple(
            KVCacheTensor(num_bytes=33 * each.page_bytes, layers=(layer,))
            for layer, each in specs.items()
        )
        group = KVCacheGroup(layers=tuple(specs), spec=spec)
        made.append(KVCacheConfig(num_blocks=33, groups=(group,), tensors=tensors))
    return made


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


def give_cache(executor):
    executor.initialize_cache(plans(executor))
    return executor


def run(launcher, executor, **keys):
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
    ("executor", "kind", "point", "expected"),
    [(name, *cell) for name in ("ray", "ray_legacy") for cell in CELLS],
)
def test_a_fault_on_the_last_rank(launcher, executor, kind, point, expected, eventually):
    import ray
    from ray.exceptions import RayActorError

    free = ray.available_resources().get("dummy")
    assert actors_below(os.getpid()) == []
    fault = f"{point}:2@1={kind}" if point == "step" else f"{point}@1={kind}"
    with pytest.raises(expected) as caught:
        run(launcher, executor, **{"plugins.dummy.fail_at": fault})
    error = caught.value
    assert error.rank == 1
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


@pytest.mark.parametrize("executor", ["ray", "ray_legacy"])
def test_an_actor_that_ray_kills_is_noticed_in_time_with_its_cause(launcher, executor):
    import ray
    from ray.exceptions import ActorDiedError

    seconds = []
    for _ in range(TRIES):  # with much beside, the machine may take longer once
        started = give_cache(launcher.start(executor=executor, **KEYS))
        started.execute_model(step(1))
        held = started.collective_rpc(sleep, args=(1000,), non_block=True)
        began = time.monotonic()
        ray.kill(started._resources.nursery._actors[1].handle)
        error = held.exception(60)
        seconds.append(time.monotonic() - began)
        assert isinstance(error, WorkerDiedError)
        assert error.rank == 1
        assert isinstance(error.__cause__, ActorDiedError)
        started.shutdown()
        if min(seconds) < NOTICED:
            return
    raise AssertionError(f"noticed after {seconds} s")


def sleep(worker, seconds):
    time.sleep(seconds)
