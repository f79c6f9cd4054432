"""How the leader starts a group over several hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from hardpoint import environment
from hardpoint.config.problems import config_error, with_origin
from hardpoint.config.resolution import effective
from hardpoint.errors import HardpointError
from hardpoint.records import Problem
from hardpoint.rpc.network.addresses import cannot_listen, explicit, split
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.hub import OPEN_TENSORS, codec_across
from hardpoint.rpc.network.key_file import read_or_write

from hardpoint_multiproc.hosts import handshake
from hardpoint_multiproc.hosts.leader import Hosts
from hardpoint_multiproc.launching import WorkerPlan, plan_workers, variables_of
from hardpoint_multiproc.spread import SpreadResources

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.rpc.calls import Call

    from hardpoint_multiproc.executor import MultiprocExecutor
    from hardpoint_multiproc.nursery_process import NurseryProcess
    from hardpoint_multiproc.settings import MultiprocSettings

LEADER, KEY_FILE = "plugins.mp.leader", "plugins.mp.key_file"


@frozen
class HostsPlan:
    """Where the leader listens, and each host's ranks, its own first."""

    host: str
    port: int
    key_file: Path
    ranks: tuple[range, ...]


def plan_of(executor: MultiprocExecutor, settings: MultiprocSettings) -> HostsPlan:
    """Return the plan of a configuration with ``nnodes``. Raises as :func:`leader_of`."""
    host, port = leader_of(executor.config, settings)
    ranks = handshake.split(executor.world_size, executor.config.parallel.nnodes)
    return HostsPlan(host, port, Path(str(settings.key_file)), ranks)


def leader_of(config: Config, settings: MultiprocSettings) -> tuple[str, int]:
    """Return where the leader of a configuration with ``nnodes`` listens. Raises ConfigError for
    what is missing or wrong.
    """
    problems = []
    nodes = config.parallel.nnodes
    host, port = "", 0
    if settings.leader is None or settings.key_file is None:
        missing = LEADER if settings.leader is None else KEY_FILE
        way_out = "Set plugins.mp.leader to this host's HOST:PORT and plugins.mp.key_file to a file"
        problems.append(
            Problem(
                key="nnodes",
                value=nodes,
                message=f"several hosts need {missing}.",
                way_out=f"{way_out}; on the others run hardpoint worker --join HOST:PORT.",
            )
        )
    else:
        try:
            host, port = split(settings.leader)
            host = explicit(host)
        except (ValueError, HardpointError) as error:
            problems.append(Problem(key=LEADER, value=settings.leader, message=f"{error}."))
    if problems:
        raise config_error([with_origin(each, config.origins) for each in problems])
    return host, port


def gather_hosts(
    executor: MultiprocExecutor,
    settings: MultiprocSettings,
    nursery: NurseryProcess,
    plan: HostsPlan,
) -> Hosts:
    """Listen for the other hosts, and return when all have joined. Raises StartTimeoutError."""
    description = executor.config.description
    model = None if description is None else handshake.Model.of(description)
    keys, made = read_or_write(plan.key_file)
    own = handshake.installation(
        executor.registry.resolved(),
        ((path, value) for path, value, _ in effective(executor.config)),
    )
    bounds = Bounds(peer_timeout=settings.peer_timeout)
    try:
        hosts = Hosts(
            nursery,
            keys,
            (plan.host, plan.port),
            plan.ranks,
            own,
            heartbeat=executor.config.rpc.heartbeat,
            bounds=bounds,
            model=model,
            made=made,
        )
    except BaseException as error:
        if made is not None:
            made.remove()
        if isinstance(error, OSError):
            raise cannot_listen(LEADER, str(settings.leader), error) from error
        raise
    try:
        hosts.await_followers(settings.start_timeout, "plugins.mp.start_timeout")
    except BaseException:
        hosts.close(0.0)
        raise
    return hosts


def spread(
    executor: MultiprocExecutor,
    settings: MultiprocSettings,
    hosts: Hosts,
    plan: HostsPlan,
    start: Call,
) -> tuple[SpreadResources, list[WorkerPlan]]:
    """Return what the group holds, and the plans of all workers as this host's own would be
    started.
    """
    executor.logger.warning(OPEN_TENSORS, ", ".join(dict.fromkeys(hosts.addresses(plan.host))))
    declared = variables_of(executor)
    places = [place for ranks in plan.ranks for place in range(len(ranks))]
    plans, abroad = (
        plan_workers(executor, declared, codec, start.call_id, settings, places, plan.ranks[0])
        for codec in (executor.codec, codec_across(executor.registry))
    )
    far = {each.rank: each for each in abroad if each.rank not in plan.ranks[0]}
    preload = list(executor.platform.preload)
    forks = executor.platform.fork_safe().safe

    def give(rank: int, packet: Mapping[str, Any]) -> None:
        sent = environment.across_hosts(
            declared[rank], os.environ, executor.config.parallel.forward_env
        )
        for name, why in sent.withheld.items():
            executor.logger.warning("%s is not sent to other hosts: %s", name, why)
        more = {"variables": dict(sent.variables), "preload": preload, "forks": forks}
        hosts.give(rank, {**packet, **more, "world_size": executor.world_size})

    resources = SpreadResources(
        executor.calls,
        executor.generation,
        hosts,
        give,
        hosts=hosts.addresses(plan.host),
        far=far,
        listen=plan.host,
        registry=executor.registry,
        bounds=Bounds(peer_timeout=settings.peer_timeout),
    )
    return resources, plans
