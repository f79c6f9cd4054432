"""What is set for workers on other nodes: by declaration, and never against the node's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from hardpoint import environment
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hardpoint_ray.placement import Seat

_logger = logging.getLogger("hardpoint.executor.ray")


def variables_on_nodes(
    declared: Sequence[Mapping[str, str]], seats: Sequence[Seat], allowed: Sequence[str]
) -> list[dict[str, str]]:
    """Return what each worker's process is to have beside its node's own environment.

    On the driver's node that is what was ``declared`` for it. Elsewhere, what the driver has of
    ``allowed`` (``forward_env``) too, no secrets, and nothing that the node has another value of:
    that is kept, and told.
    """
    here = ray.get_runtime_context().get_node_id()
    found = []
    own: dict[str, Mapping[str, str]] = {}
    for seat in seats:
        if seat.node_id == here:
            found.append(dict(declared[seat.rank]))
            continue
        sent = environment.across_hosts(declared[seat.rank], os.environ, allowed)
        for name, why in sent.withheld.items():
            _logger.warning("%s is not sent to other nodes: %s", name, why)
        if not sent.variables:
            found.append({})
            continue
        if seat.node_id not in own:
            own[seat.node_id] = _asked(seat.node_id, sorted(sent.variables))
        has = own[seat.node_id]
        for line in environment.merged(has, sent.variables)[1]:
            _logger.warning("worker rank %d, node %s: %s", seat.rank, seat.node_id[:8], line)
        found.append({name: value for name, value in sent.variables.items() if name not in has})
    return found


def own_variables(names: Sequence[str]) -> dict[str, str]:
    """Return those of ``names`` that this node has. Runs on the node, below its raylet, whose
    environment is the node's: to a worker's own, Ray has added some.
    """
    data = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="surrogateescape")
    pairs = (entry.partition("=") for entry in data.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs if name in names}


def _asked(node_id: str, names: Sequence[str]) -> Mapping[str, str]:
    where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=1, scheduling_strategy=where)(own_variables)
    found: Mapping[str, str] = ray.get(task.remote(names))
    return found
