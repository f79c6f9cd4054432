"""Notes in every worker when its steps began and ended. Offered as any extension offers its hooks.

Found only while a picture is asked for (see :mod:`hardpoint_engine.temporary_extension`): else
nobody listens to steps. Times are of the host's monotonic clock, the same in all its processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.hookspecs import hookimpl
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput
from hardpoint.records import ExtensionRecord
from hardpoint.worker import Worker

NAME = "timeline"
MODULE = "hardpoint_engine.timeline.extension"
SPANS = "timeline_spans"
"""The worker method that gives the spans."""
MOST = 1 << 20
"""Spans kept of each rank; the oldest go first, and are counted."""

Span = tuple[int, float, float, tuple[float, float, float] | None]
"""Step id, begin and end in monotonic s, and the seconds of prepare, forward and sample."""

_began: dict[tuple[int, int], float] = {}
_spans: dict[int, deque[Span]] = {}
_dropped: dict[int, int] = {}


@hookimpl
def hardpoint_extension() -> ExtensionRecord:
    """Say who it is."""
    return ExtensionRecord(name=NAME, api=(1, 0))


@hookimpl
def hardpoint_worker_methods() -> Mapping[str, Callable[..., object]]:
    """Offer the method that gives the spans."""
    return {SPANS: take_spans}


@hookimpl
def hardpoint_worker_started(worker: Worker) -> None:
    """Forget what an earlier worker of this rank left in this process uncollected."""
    for key in [key for key in _began if key[0] == worker.rank]:
        del _began[key]
    _spans.pop(worker.rank, None)
    _dropped.pop(worker.rank, None)


@hookimpl
def hardpoint_step_started(scheduler_output: SchedulerOutput, rank: int | None) -> None:
    """Note a beginning."""
    if rank is not None:
        _began[rank, scheduler_output.step_id] = time.monotonic()


@hookimpl
def hardpoint_step_finished(
    scheduler_output: SchedulerOutput, output: ModelRunnerOutput | None, rank: int | None
) -> None:
    """Note an end."""
    if rank is None:
        return
    began = _began.pop((rank, scheduler_output.step_id), None)
    if began is None:
        return
    timings = None if output is None else output.timings
    phases = None if timings is None else (timings.prepare, timings.forward, timings.sample)
    spans = _spans.setdefault(rank, deque(maxlen=MOST))
    if len(spans) == spans.maxlen:
        _dropped[rank] = _dropped.get(rank, 0) + 1
    spans.append((scheduler_output.step_id, began, time.monotonic(), phases))


def take_spans(worker: Any, most: int) -> tuple[int, list[Span]]:
    """Return, once, how many spans of this rank are gone, and then the oldest others, up to
    ``most``. Fewer: there are no more.
    """
    spans = _spans.get(worker.rank, deque())
    taken = [spans.popleft() for _ in range(min(most, len(spans)))]
    if not spans:
        _spans.pop(worker.rank, None)
    return _dropped.pop(worker.rank, 0), taken
