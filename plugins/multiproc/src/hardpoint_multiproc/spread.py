"""What an executor holds for workers of which some are on other hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve
from hardpoint.rpc import channel
from hardpoint.rpc.calls import CallTable
from hardpoint.rpc.claims import CallerClaims, Unclaimed
from hardpoint.rpc.composite import CompositeDriverEnd
from hardpoint.rpc.control import ControlLane
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.hub import RENDEZVOUS, Hub
from hardpoint.rpc.receiver import Receiver

from hardpoint_multiproc.launching import Launch, WorkerPlan, make_launches
from hardpoint_multiproc.resources import Resources

if TYPE_CHECKING:
    from hardpoint.registry import Registry
    from hardpoint.rpc.encoding import Codec


class SpreadResources(Resources):
    """The workers of the driver's host share memory with it, the others come by the network.

    ``starter`` is what starts and ends processes (a nursery, or what is one to the group).
    ``give(rank, packet)`` takes what the worker of another host is to be handed; it holds that
    rank's keys. ``hosts`` is the address of each rank's host, ``far`` has the plans of the ranks on
    other hosts, encoded for the network. ``listen`` is the driver's own address.
    """

    def __init__(
        self,
        calls: CallTable,
        generation: int,
        starter: Any,
        give: Callable[[int, Mapping[str, Any]], None],
        *,
        hosts: Sequence[str],
        far: Mapping[int, WorkerPlan],
        listen: str,
        registry: Registry,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__(calls, generation, starter)
        self._give = give
        self._hosts = hosts
        self._far = far
        self._listen = listen
        self._registry = registry
        self._bounds = bounds
        self._hub: Hub | None = None
        self._board: CallerClaims | None = None

    def make(self, kind: str, spin_us: float, codec: Codec, plans: Sequence[WorkerPlan]) -> None:
        """Make both channels as one, and what each worker is given."""
        remote = sorted(self._far)
        near = [plan for plan in plans if plan.rank not in self._far]
        self._hub = hub = Hub(
            len(plans),
            remote,
            self._listen,
            registry=self._registry,
            spin_us=spin_us,
            bounds=self._bounds,
        )
        local = channel.create(kind, len(near), spin_us=spin_us, codec=codec)
        ranks = [plan.rank for plan in near]
        self._end = end = CompositeDriverEnd(local, ranks, hub.end, remote)
        self._receiver = Receiver(end, self.calls)
        self._claims = Unclaimed()  # what was sent to other hosts is not taken back
        self._board = CallerClaims(len(plans))  # which those of this host still look at
        beside = [
            evolve(plan, spec={**plan.spec, "place": place, "rendezvous": RENDEZVOUS})
            for place, plan in enumerate(near)
        ]

        def meeting(rank: int) -> bytes:
            return json.dumps(hub.rendezvous_data(rank, self._hosts[rank])).encode()

        make_launches(beside, self.launches, end, self._board, self.nursery.output, meeting)
        for rank in remote:
            plan = self._far[rank]
            lane = ControlLane(hub.lane(rank))
            self.launches.append(Launch(rank=rank, title=plan.title, lane=lane))
            self._give(rank, self._packet(plan, hub))
        self.launches.sort(key=lambda launch: launch.rank)

    def close(self, deadline: float) -> None:
        """End the workers, then the network."""
        super().close(deadline)
        if self._hub is not None:
            self._hub.close()
        if self._board is not None:
            self._board.close()

    def _packet(self, plan: WorkerPlan, hub: Hub) -> dict[str, Any]:
        """Return what the worker on another host is given."""
        return {
            "rank": plan.rank,
            "title": plan.title,
            "heartbeat": plan.spec["heartbeat"],
            "boot": plan.boot,
            "worker": hub.worker_data(plan.rank),
            "rendezvous": hub.rendezvous_data(plan.rank, self._hosts[plan.rank]),
        }
