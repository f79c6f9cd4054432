"""Which worker goes where: the bundles of a placement group, and the ranks in them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import ray
import ray.util
from attrs import frozen
from hardpoint.config.problems import config_error
from hardpoint.errors import ExecutorFailedError
from hardpoint.records import Placement, Problem
from ray.util.placement_group import PlacementGroup

from hardpoint_ray.settings import PLACEMENT_TIMEOUT

if TYPE_CHECKING:
    from hardpoint_ray.settings import RaySettings

_logger = logging.getLogger("hardpoint.executor.ray")

NODE_LABEL = "ray.io/node-id"
FIRST_LINE = 5.0
"""Seconds after which the first line tells that resources are awaited; the next take twice as long
each.
"""


class PlacementError(ExecutorFailedError):
    """Workers cannot be placed: what was asked for, and what each node has.

    What to do: free resources, add nodes, or ask for fewer workers (``tensor_parallel_size``,
    ``pipeline_parallel_size``).
    """


@frozen(kw_only=True)
class Node:
    """One node of Ray: amounts of each resource."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@frozen(kw_only=True)
class Bundle:
    """One bundle that can hold a worker, and the node where it lies."""

    index: int
    node_id: str


@frozen(kw_only=True)
class Seat:
    """Where one worker goes. ``local_rank`` counts those of its node."""

    rank: int
    local_rank: int
    bundle: int
    node_id: str


@frozen(kw_only=True)
class Reservation:
    """The placement group, and who sits where; ``own``: it was made here."""

    group: PlacementGroup
    seats: tuple[Seat, ...]
    own: bool

    def close(self) -> None:
        """Give the group back, if it was made here."""
        if self.own and ray.is_initialized():
            ray.util.remove_placement_group(self.group)


def needs(placement: Placement) -> dict[str, float]:
    """Return what one worker needs. Raises ConfigError for a platform that names no resource."""
    found = {name: float(n) for name, n in placement.resources_per_worker.items() if n}
    if not found:
        raise config_error(
            [
                Problem(
                    key="executor",
                    value="ray",
                    message="Ray places by resource, and this platform names none "
                    "(Placement.resources_per_worker).",
                    way_out="Choose executor = 'mp'.",
                )
            ]
        )
    return found


def assign(
    bundles: Sequence[Bundle], driver: str, world_size: int, indices: Sequence[int] | None
) -> tuple[Seat, ...]:
    """Return the seat of each rank: as ``indices`` say; else the driver's node first, then those
    with fewer bundles, so that the bundles of a node are neighbours.

    Raises PlacementError naming counts: too few bundles, indices that are not one for each rank,
    none on the driver's node.
    """
    known = {bundle.index: bundle for bundle in bundles}
    if indices is not None:
        chosen = _indexed(known, world_size, indices)
    else:
        count = Counter(bundle.node_id for bundle in bundles)

        def place(bundle: Bundle) -> tuple[bool, int, str, int]:
            node = bundle.node_id
            return (node != driver, count[node], node, bundle.index)

        chosen = sorted(bundles, key=place)[:world_size]
    if len(chosen) < world_size:
        raise PlacementError(
            f"{world_size} workers need as many bundles, and the placement group has {len(chosen)} "
            "that can hold one"
        )
    if all(bundle.node_id != driver for bundle in chosen):
        raise PlacementError(
            f"none of the {world_size} bundles is on the driver's node ({driver[:8]}); rank 0 "
            "must be beside the driver"
        )
    seen: Counter[str] = Counter()
    seats = []
    for rank, bundle in enumerate(chosen):
        local_rank = seen[bundle.node_id]
        seen[bundle.node_id] += 1
        seats.append(
            Seat(rank=rank, local_rank=local_rank, bundle=bundle.index, node_id=bundle.node_id)
        )
    return tuple(seats)


def warn_of_spread(seats: Sequence[Seat], shards: int) -> None:
    """Tell of every ``shards`` neighbouring ranks, which compute each layer together, that are on
    several nodes.
    """
    for first in range(0, len(seats), shards):
        nodes_of = {seat.node_id for seat in seats[first : first + shards]}
        if len(nodes_of) > 1:
            _logger.warning(
                "the tensor shards of ranks %d to %d are on %d nodes, so every layer waits for the "
                "network; plugins.ray.strategy = 'STRICT_PACK' keeps them on one, and pipeline "
                "stages (pipeline_parallel_size) may be apart",
                first,
                first + shards - 1,
                len(nodes_of),
            )


def _indexed(known: Mapping[int, Bundle], count: int, indices: Sequence[int]) -> list[Bundle]:
    if len(indices) != count or len(set(indices)) != len(indices):
        raise PlacementError(
            f"plugins.ray.bundle_indices = {list(indices)}: {count} workers need as many "
            "different bundles"
        )
    if missing := [index for index in indices if index not in known]:
        raise PlacementError(
            f"plugins.ray.bundle_indices: bundles {missing} cannot hold a worker; these can: "
            f"{sorted(known)}"
        )
    return [known[index] for index in indices]


def table(
    asked: Mapping[str, float], count: int, nodes: Sequence[Node], strategy: str | None = None
) -> str:
    """Return, as text, what ``count`` workers ask for, how they are to be laid over nodes if that
    is to be decided yet, and what each node has.
    """
    names = sorted(asked)
    head = ", ".join(f"{asked[name]:g} {name}" for name in names)
    laid = "" if strategy is None else f" (plugins.ray.strategy = {strategy!r})"
    lines = [f"{count} workers, each {head}{laid}; free of all:"]
    for node in nodes:
        has = ", ".join(f"{node.free.get(n, 0):g} of {node.total.get(n, 0):g} {n}" for n in names)
        lines.append(f"  node {node.node_id[:8]} ({node.address}): {has}")
    return "\n".join(lines)


def fits(asked: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    """Whether ``amounts`` hold what one worker asks for."""
    return all(amounts.get(name, 0.0) >= amount for name, amount in asked.items())


def nodes() -> list[Node]:
    """Return the living nodes of the Ray that this process is connected to."""
    from ray._private.state import available_resources_per_node  # Ray has no public way

    free = available_resources_per_node()
    return [
        Node(
            node_id=each["NodeID"],
            address=each["NodeManagerAddress"],
            total=each["Resources"],
            free=free.get(each["NodeID"], {}),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def addresses() -> dict[str, str]:
    """Return node -> address, as Ray's own nodes reach each other."""
    return {node.node_id: node.address for node in nodes()}


def reserve(settings: RaySettings, placement: Placement) -> Reservation:
    """Have a bundle for each worker: of the given group, the current one, or a new one; wait until
    it is there.

    Raises PlacementError with the table of asked and free resources at the deadline, or for a group
    that cannot hold the workers; ConfigError for bundles without a group.
    """
    asked, count = needs(placement), placement.num_workers
    driver = ray.get_runtime_context().get_node_id()
    group = _given(settings)
    own = group is None
    strategy = settings.strategy if own else None
    if group is None:
        group = _create(settings, asked, count, driver)
    try:
        awaited(
            group.wait,
            settings.placement_timeout,
            lambda: table(asked, count, nodes(), strategy),
            "place the workers",
        )
        where = ray.util.placement_group_table(group)["bundles_to_node_id"]
        bundles = [
            Bundle(index=index, node_id=where[index])
            for index, amounts in enumerate(group.bundle_specs)
            if fits(asked, amounts)
        ]
        try:
            seats = assign(bundles, driver, count, settings.bundle_indices)
        except PlacementError as error:
            raise PlacementError(f"{error}\n{table(asked, count, nodes())}") from None
    except BaseException:
        if own:
            ray.util.remove_placement_group(group)
        raise
    return Reservation(group=group, seats=seats, own=own)


def _given(settings: RaySettings) -> PlacementGroup | None:
    name = settings.placement_group
    if name is None:
        return ray.util.get_current_placement_group()
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        raise PlacementError(
            f"plugins.ray.placement_group = {name!r}: Ray has no such placement group in this "
            "namespace"
        ) from error


def _create(
    settings: RaySettings, asked: Mapping[str, float], count: int, driver: str
) -> PlacementGroup:
    """Ask for a new group whose first bundle is on the driver's node."""
    if settings.bundle_indices is not None:
        problem = Problem(
            key="plugins.ray.bundle_indices",
            value=list(settings.bundle_indices),
            message="they count the bundles of a placement group that is there, and there is none.",
            way_out="Name one (plugins.ray.placement_group), or run the driver in one.",
        )
        raise config_error([problem])
    found = nodes()
    here = next((node for node in found if node.node_id == driver), None)
    if here is None or not fits(asked, here.total):
        raise PlacementError(
            f"the driver's node ({driver[:8]}) has not what one worker needs, and one must be "
            f"there\n{table(asked, count, found)}"
        )
    first: list[dict[str, str]] = [{NODE_LABEL: driver}, *({} for _ in range(count - 1))]
    return ray.util.placement_group(
        [dict(asked) for _ in range(count)],
        strategy=settings.strategy,
        bundle_label_selector=first,
    )


def awaited(
    come: Callable[[float], bool], timeout: float, told: Callable[[], str], what: str
) -> None:
    """Wait until ``come(seconds)`` says yes; tell meanwhile, ever rarer, what is asked for and
    free. Raises PlacementError with that, ``told()``, after ``timeout`` seconds; ``what`` is what
    Ray is to do.
    """
    began, pause = time.monotonic(), FIRST_LINE
    while True:
        left = began + timeout - time.monotonic()
        if come(max(0.0, min(pause, left))):
            return
        waited = time.monotonic() - began
        if waited >= timeout:
            raise PlacementError(
                f"Ray did not {what} within {PLACEMENT_TIMEOUT} = {timeout:g} s\n{told()}"
            )
        if waited >= pause:
            _logger.warning("waiting for Ray to %s for %.0f s; %s", what, waited, told())
            pause *= 2
