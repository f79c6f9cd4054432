"""The actor in which a worker lives. Runs in a process that Ray starts, on any node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import hardpoint
import ray
from attrs import evolve, frozen
from hardpoint.rpc.process_life import end_with_parent
from hardpoint_multiproc import descriptors

from hardpoint_ray import far_stacks, handover, model_files

if TYPE_CHECKING:
    from hardpoint_multiproc.worker_entry import Carriage


@frozen(kw_only=True)
class Whereabouts:
    """What an actor tells of itself: process, the raylet (Ray's own process of its node), node,
    version of the core that it has, the descriptor of its memory for stacks, and resource -> ids of
    what it was given.
    """

    pid: int
    raylet: int
    node_id: str
    core: str
    stacks: int
    resources: Mapping[str, tuple[str, ...]]


class WorkerActor:
    """Tells where it is; then is a worker until the driver wants no more.

    Ray shows ``title`` for it, in logs too.
    """

    def __init__(self, title: str) -> None:
        # While an actor works Ray does not end it with its raylet, and learns of such a node's end
        # by a quarter of a minute of silence.
        self._raylet = os.getppid()
        end_with_parent(self._raylet)
        self._title = title
        self.carriage: Carriage | None = None
        self._stacks = descriptors.memory("stacks")

    def __repr__(self) -> str:
        return self._title

    def where(self) -> Whereabouts:
        """Return where this actor is and what Ray gave it."""
        context = ray.get_runtime_context()
        given = dict.fromkeys(context.get_assigned_resources(), ())
        ids = {name: tuple(map(str, each)) for name, each in context.get_accelerator_ids().items()}
        return Whereabouts(
            pid=os.getpid(),
            raylet=self._raylet,
            node_id=context.get_node_id(),
            core=hardpoint.__version__,
            stacks=self._stacks,
            resources={**given, **{name: each for name, each in ids.items() if each}},
        )

    def model_files(self, path: str, model_format: str) -> dict[str, str]:
        """Return what the model's files are on this node."""
        return model_files.files_at(path, model_format)

    def run_beside(self, name: str, resources: Mapping[str, tuple[str, ...]]) -> int:
        """Be a worker on the driver's node, by what it hands over at the socket ``name``; return
        the exit code.
        """
        from hardpoint_multiproc.worker_entry import enter, serve

        told, out, *rest = handover.take(name)
        _speak(out)
        spec = json.loads(descriptors.contents(told))
        os.close(told)
        enter(spec["cwd"])
        sys.path += [each for each in spec["path"] if each not in sys.path]
        return serve(spec, rest, resources, self.carriage)

    def run_afar(self, packet: Mapping[str, Any], resources: Mapping[str, tuple[str, ...]]) -> int:
        """Be a worker on another node than the driver's, by what ``packet`` holds; return the exit
        code.
        """
        from hardpoint.rpc.control import ControlThread
        from hardpoint.rpc.network.hub import attach, codec_across, rendezvous_file
        from hardpoint.rpc.network.lanes import WorkerLane
        from hardpoint.rpc.worker_process import run

        far_stacks.register(self._stacks)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        rank, channel = packet["rank"], packet["worker"]["channel"]
        codec = codec_across()
        lane = WorkerLane(packet["worker"]["lane"])
        control = ControlThread(lane.end, packet["heartbeat"], rank=rank)
        control.start()
        control.stage("boot")
        orders = codec.decode(packet["boot"], "the worker's boot record")
        fd, address = rendezvous_file(packet["rendezvous"])
        try:
            orders = evolve(orders, rendezvous=address, resources=resources)
            join = partial(attach, channel, rank, codec)
            if (carriage := self.carriage) is None:
                return run(orders, join, control, None, codec.learn)
            join = partial(carriage.attach, join, codec, control.cancelled)
            return run(orders, join, control, None, codec.learn, carriage.stages)
        finally:
            os.close(fd)


def _speak(out: int) -> None:
    """Have all that this process writes go to ``out``."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    options: dict[str, Any] = {"buffering": 1, "errors": "backslashreplace", "closefd": False}
    sys.stdout = os.fdopen(1, "w", **options)
    sys.stderr = os.fdopen(2, "w", **options)
