"""What the graphs of a plan will take of the device's memory, before the KV cache gets the rest.

Graphs share one pool, and larger ones are captured first: the first of a mode takes the pool, each
later one little more than itself. So two of each mode are captured and measured; the others are
counted as the second.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from attrs import evolve

from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import Capture, GraphPlan

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.model_runner import AcceleratorModelRunner

MEASURED = 2
"""Graphs of each mode that are captured to measure."""


def graph_memory(runner: AcceleratorModelRunner, plan: GraphPlan) -> int:
    """Return the bytes that capturing ``plan`` takes, static buffers included. The runner has a KV
    cache, be it of one block. Called in the device's gradient mode.
    """
    sample = measured(plan)
    device = runner.port
    before = device.memory_held()
    graphs = runner.make_graphs(evolve(plan, graphs=frozenset(sample)))
    try:
        report = graphs.capture_all()
        taken = max(0, device.memory_held() - before)
    finally:
        graphs.close()
    return taken + rest(plan, dict(zip(sample, report.growth, strict=True)))


def measured(plan: GraphPlan) -> list[Capture]:
    """Return the captures to measure, in the plan's order: the largest of each mode."""
    counts: defaultdict[GraphMode, int] = defaultdict(int)
    chosen = []
    for capture in plan.captures():
        counts[capture.mode] += 1
        if counts[capture.mode] <= MEASURED:
            chosen.append(capture)
    return chosen


def rest(plan: GraphPlan, growth: dict[Capture, int]) -> int:
    """Return what the captures that were not measured will take: each as much as the last of its
    mode that was (``growth``, in the plan's order).
    """
    last = {capture.mode: max(0, num_bytes) for capture, num_bytes in growth.items()}
    return sum(last[each.mode] for each in plan.captures() if each not in growth)
