"""What each worker's process is given: its boot record, variables, path, cores and descriptors."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import NOTHING, define, evolve, field, fields, frozen, has
from hardpoint.config.problems import config_error, with_origin
from hardpoint.records import Problem
from hardpoint.rpc.channel import DriverEnd
from hardpoint.rpc.claims import CallerClaims
from hardpoint.rpc.control import ControlLane, lane
from hardpoint.rpc.worker_process import Boot

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.affinity import shares_of
from hardpoint_multiproc.titles import title_of

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.executor import Executor
    from hardpoint.rpc.encoding import Codec

    from hardpoint_multiproc.output import Output
    from hardpoint_multiproc.settings import MultiprocSettings

_logger = logging.getLogger("hardpoint.executor.mp")

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What workers that share cores are told, unless the driver's own variables or the platform's say
something else. The libraries that the nursery has imported were told so, too.
"""

RENDEZVOUS = 6
"""Where the rendezvous stands among the descriptors that a worker is given."""


@define(eq=False)
class Launch:
    """One worker to start, and everything that was made for it.

    ``given`` are the descriptors that go to the worker, in order; ``lane`` is the driver's end of
    its control lane, ``stacks`` the memory for the stacks of its threads. Whatever is made is put
    here at once, so that an interrupt loses nothing.
    """

    rank: int
    title: str
    given: list[int] = field(factory=list)
    lane: ControlLane | None = None
    stacks: int = -1

    def hand_over(self) -> None:
        """Close what went to the worker."""
        given, self.given = self.given, []
        descriptors.close(given)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.hand_over()
        if self.lane is not None:
            self.lane.close()
        stacks, self.stacks = self.stacks, -1
        descriptors.close([stacks] if stacks >= 0 else ())


def variables_of(executor: Executor) -> list[dict[str, str]]:
    """Return the variables that the platform and the plugins want in each worker."""
    common = executor.platform.environment(executor.config, executor.placement)
    registry, config = executor.registry, executor.config
    return [{**common, **registry.worker_env(config, rank)} for rank in range(executor.world_size)]


def check_devices(executor: Executor) -> None:
    """Raise ConfigError if the configuration names fewer devices than the workers own."""
    devices, placement = executor.config.device.devices, executor.placement
    needed = placement.num_workers * placement.devices_per_worker
    if devices is not None and len(devices) < needed:
        problem = Problem(
            key="devices",
            value=devices,
            message=f"{placement.num_workers} workers need {needed} devices.",
            way_out="Name as many, or none to have them numbered from 0.",
        )
        raise config_error([with_origin(problem, executor.config.origins)])


@frozen(kw_only=True)
class WorkerPlan:
    """What one worker will be told: ``spec`` as JSON for its process to become one, ``boot`` as the
    codec encoded it for the worker to be built.

    In ``spec``, ``rendezvous`` is what the address of one begins with (empty: there is none), and
    ``place`` the worker's among those of its channel.
    """

    rank: int
    title: str
    spec: dict[str, Any]
    boot: bytes


def plan_workers(
    executor: Executor,
    variables: Sequence[Mapping[str, str]],
    codec: Codec,
    start_call: int,
    settings: MultiprocSettings,
    local_ranks: Sequence[int] | None = None,
    here: Sequence[int] | None = None,
) -> list[WorkerPlan]:
    """Decide what each worker is told; opens nothing. ``local_ranks`` are those among the workers
    of each one's host; None: all are on one. ``here`` are the ranks of this host; None: all.
    """
    world_size = executor.world_size
    locals_ = range(world_size) if local_ranks is None else local_ranks
    cores, shared = _cores(executor, settings, range(world_size) if here is None else here)
    folder = _folder()
    plans = []
    for rank in range(world_size):
        title = title_of(executor.config, rank, world_size)
        spec = {
            "rank": rank,
            "title": title,
            "env": {**(_ONE_THREAD if shared else {}), **os.environ, **variables[rank]},
            "path": list(sys.path),
            "cwd": folder,
            "argv": list(sys.argv),
            "cores": cores.get(rank),
            "heartbeat": executor.config.rpc.heartbeat,
            "codec": codec.name,
            "rendezvous": "file://" if world_size > 1 else "",
            "place": rank,
        }
        record = _boot(executor, rank, locals_[rank], start_call)
        boot = codec.encode(record, "the worker's boot record")
        plans.append(WorkerPlan(rank=rank, title=title, spec=spec, boot=bytes(boot.data)))
    return plans


def make_launches(
    plans: Sequence[WorkerPlan],
    launches: list[Launch],
    end: DriverEnd,
    claims: CallerClaims,
    output: Output,
    meeting: Callable[[int], bytes] | None = None,
) -> None:
    """Make everything that the workers are given; each thing is in ``launches`` as soon as it is
    made. ``meeting(rank)`` is what that rank's rendezvous holds; None: all share one, empty yet.
    """
    for plan in plans:
        launch = Launch(rank=plan.rank, title=plan.title)
        launches.append(launch)
        handle = end.worker_handle(plan.rank)
        spec = json.dumps({**plan.spec, "channel": dict(handle.data)})
        give = launch.given.append
        give(descriptors.memory("spec", spec.encode()))
        give(output.add(plan.rank, plan.title))
        give(_lane(launch))
        give(descriptors.memory("boot", plan.boot))
        launch.stacks = descriptors.memory("stacks")
        give(os.dup(launch.stacks))
        give(os.dup(claims.fd))
        if plan.spec["rendezvous"]:
            first = launches[0].given
            if meeting is not None:
                give(descriptors.memory("rendezvous", meeting(plan.rank)))
            else:
                give(os.dup(first[RENDEZVOUS]) if plan.rank else descriptors.memory("rendezvous"))
        for fd in handle.fds:
            give(os.dup(fd))


def _folder() -> str:
    """Return the driver's folder; empty if it was deleted: workers then keep what they inherit."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _lane(launch: Launch) -> int:
    ours, theirs = lane()
    launch.lane = ControlLane(ours)
    return theirs.detach()


def _boot(executor: Executor, rank: int, local_rank: int, start_call: int) -> Boot:
    config, registry, platform = executor.config, executor.registry, executor.platform
    return Boot(
        config=_portable(config),
        plugins=tuple(registry.resolved()),
        platform=platform.name,
        worker_class=registry.worker_class(config, platform),
        model_runner=registry.model_runner_class(config, platform),
        rank=rank,
        local_rank=local_rank,
        world_size=executor.world_size,
        generation=executor.generation,
        start_call=start_call,
        devices=_devices(executor, rank),
        log_level=logging.getLogger("hardpoint").getEffectiveLevel(),
    )


def _portable(config: Config) -> Config:
    """Return the configuration as another process can have it: an executor class by its name, and
    plugins' settings as the keys that were set, of which the worker makes settings again.
    """
    chosen = config.executor
    if isinstance(chosen, type):
        chosen = f"{chosen.__module__}:{chosen.__qualname__}"
    keys = {name: _keys_of(each) for name, each in config.plugins.settings.items()}
    return evolve(config, executor=chosen, plugins=evolve(config.plugins, settings=keys))


def _keys_of(settings: Any) -> Any:
    kind = type(settings)
    if not has(kind):
        return settings
    needed = {each.name: getattr(settings, each.name) for each in fields(kind)}
    mandatory = {each.name for each in fields(kind) if each.default is NOTHING}
    default = kind(**{name: needed[name] for name in mandatory})
    return {
        name: value
        for name, value in needed.items()
        if name in mandatory or value != getattr(default, name)
    }


def _devices(executor: Executor, rank: int) -> tuple[str, ...]:
    """Return the devices that worker ``rank`` owns, of those that the configuration names."""
    each = executor.placement.devices_per_worker
    return tuple(executor.config.device.devices or ())[rank * each : (rank + 1) * each]


def _cores(
    executor: Executor, settings: MultiprocSettings, here: Sequence[int]
) -> tuple[dict[int, list[int]], bool]:
    """Return the cores that each worker ``here`` is kept on, by rank, none where it is left to the
    worker; and whether all share the cores because there are too few.

    A platform that counts its workers' processors (``resources_per_worker["CPU"]``) binds them.
    """
    count = len(here)
    alone = executor.world_size == 1
    if not settings.bind or alone or "CPU" in executor.placement.resources_per_worker:
        return {}, False
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        _logger.info("%d workers share %d cores, one thread each", count, len(cores))
        return {}, True
    shares = map(list, shares_of(cores, count))
    return dict(zip(here, shares, strict=True)), False
