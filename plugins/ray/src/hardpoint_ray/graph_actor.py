"""The actor of ``ray_legacy``: a worker to which steps come by a compiled graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ray.dag import DAGContext

from hardpoint_ray.actor import WorkerActor
from hardpoint_ray.step_line import GraphEnd, StepLine

if TYPE_CHECKING:
    from hardpoint.rpc.encoding import Codec
    from hardpoint.rpc.worker_process import CallEnd
    from hardpoint.stages import StageCarrier

OVERHEAD = 1 << 16
"""Bytes of a channel for what Ray, and the lengths of pieces, need beside what is carried."""


class GraphCarriage:
    """What a worker's process has of the graph. ``answers``: the output rank's values go by it.
    ``carries``: there are several stages; ``most`` are the bytes that one may hand on.
    """

    def __init__(self, *, answers: bool, carries: bool, most: int | None) -> None:
        self.line = StepLine(most)
        self._answers = answers
        self._carries = carries

    @property
    def stages(self) -> StageCarrier | None:
        """The graph's line between stages, if there are several."""
        return self.line if self._carries else None

    def attach(
        self, attach: Callable[[], CallEnd], codec: Codec, leaves: Callable[[], bool]
    ) -> CallEnd:
        """Return the worker's end of its channel, with the graph beside it."""
        return GraphEnd(attach(), codec, self.line, leaves, self._answers)


class GraphActor(WorkerActor):
    """A worker whose steps Ray's graph brings, on a thread that Ray has for it."""

    carriage: GraphCarriage

    def __init__(
        self, title: str, *, answers: bool, carries: bool, most: int | None = None
    ) -> None:
        super().__init__(title)
        with suppress(ImportError):  # as Ray's thread does it, were it not done by then
            importlib.import_module("torch")
        self.carriage = GraphCarriage(answers=answers, carries=carries, most=most)
        if most is not None:
            DAGContext.get_current().buffer_size_bytes = most + OVERHEAD

    def step(self, order: bytes, carried: bytes = b"") -> bytes:
        """Run one step. Called by Ray's graph."""
        return self.carriage.line.run(order, carried)
