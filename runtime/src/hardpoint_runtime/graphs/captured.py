"""The graphs that were made: filled once, in the plan's order, during warm-up; closed for ever
after.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen
from hardpoint.errors import LifecycleError

from hardpoint_runtime.graphs.keys import BatchKey
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import Capture, GraphPlan

Graph = TypeVar("Graph")


@frozen(kw_only=True)
class CaptureReport:
    """What capturing cost: ``graphs`` made, in ``seconds``, holding ``num_bytes`` more of the
    device's memory; ``growth`` is how much more after each, in the plan's order.
    """

    graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    growth: tuple[int, ...] = ()


class CapturedGraphs(Generic[Graph]):
    """Capture -> graph, for the captures of one plan. Owned by the runner."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.closed = False
        self._graphs: dict[Capture, Graph] = {}

    def capture_all(
        self,
        run: Callable[[Capture], object],
        record: Callable[[Capture], Graph],
        *,
        warm_ups: int = 1,
        memory: Callable[[], int] | None = None,
    ) -> CaptureReport:
        """Make every graph of the plan, in its order: each after ``warm_ups`` eager runs of its
        batch. Then close. ``memory()`` gives the bytes held on the device.

        Called by the runner's warm-up. Raises LifecycleError the second time.
        """
        started = time.perf_counter()
        held = [memory() if memory else 0]
        for capture in self.plan.captures():
            for _ in range(warm_ups):
                run(capture)
            self.add(capture, record)
            held.append(memory() if memory else 0)
        self.close()
        return CaptureReport(
            graphs=len(self._graphs),
            seconds=time.perf_counter() - started,
            num_bytes=held[-1] - held[0],
            growth=tuple(after - before for before, after in itertools.pairwise(held)),
        )

    def add(self, capture: Capture, record: Callable[[Capture], Graph]) -> None:
        """Make one graph. Raises LifecycleError after warm-up, for a graph that is not planned, and
        for one that is there.
        """
        if self.closed:
            raise LifecycleError(
                f"a graph for {_words(capture)} would be captured after warm-up; a batch without a "
                "graph runs eagerly"
            )
        if capture not in self.plan.graphs:
            raise LifecycleError(f"the graph plan has no graph for {_words(capture)}")
        if capture in self._graphs:
            raise LifecycleError(f"the graph for {_words(capture)} was captured before")
        self._graphs[capture] = record(capture)

    def close(self) -> None:
        """Let no graph be added any more."""
        self.closed = True

    def find(self, mode: GraphMode, key: BatchKey) -> Graph | None:
        """Return the graph of a dispatch, None for an eager one."""
        return self._graphs.get(Capture(mode=mode, key=key))

    def clear(self) -> None:
        """Drop all graphs, and stay closed. Called when the runner closes."""
        self.close()
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)


def _words(capture: Capture) -> str:
    return f"{capture.mode.name} {capture.key}"
