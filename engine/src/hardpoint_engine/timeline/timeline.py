"""Writes what an engine does as a trace in the Chrome trace format, which Perfetto opens, too.

Driver side. Events are written soon after they happen, and the file is whole at every moment. Times
are in microseconds of the host's monotonic clock. What is missing is said in the trace and in the
log; a file that cannot be written any more ends the trace, and harms nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hardpoint.errors import HardpointError, InvalidRequestError
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput

from hardpoint_engine.request import EngineOutput, RequestMetrics
from hardpoint_engine.timeline.extension import SPANS, Span
from hardpoint_engine.timeline.trace_file import TraceFile

if TYPE_CHECKING:
    from hardpoint_engine.core import EngineCore

_logger = logging.getLogger("hardpoint.engine")

DRIVER, REQUESTS, FIRST_RANK = 1, 2, 10
"""Numbers of the processes in the picture; rank r is ``FIRST_RANK + r``."""
COLLECT_SECONDS = 10.0
"""How long the workers may take to give a portion of their spans."""
PORTION = 20_000
"""Spans of each rank that are fetched at once."""


class Timeline:
    """One picture, written to ``path``. Raises InvalidRequestError if that cannot be written."""

    def __init__(self, path: str) -> None:
        try:
            self._file = TraceFile(path)
        except OSError as error:
            raise InvalidRequestError(
                f"the trace {path} cannot be written: {error.strerror}", field="trace", value=path
            ) from None
        self._path = path
        self._failed = False
        self._lanes: dict[int, list[float]] = {}
        self._name("process_name", DRIVER, 0, "driver")
        self._name("process_name", REQUESTS, 0, "requests")

    def step(
        self,
        plan: SchedulerOutput,
        output: ModelRunnerOutput | None,
        *,
        planned: float,
        sent: float,
        landed: float,
        done: float,
    ) -> None:
        """Add a step: it was ``planned`` from then on, ``sent``, its result ``landed``, and it was
        taken in by ``done``. ``output`` None: it failed. Called by the engine core.
        """
        if self._failed:
            return
        lane = self._lane(DRIVER, planned, done, "steps")
        facts = {
            "tokens": plan.total_tokens,
            "requests": dict(plan.num_tokens),
            "failed": output is None,
        }
        if output is not None and output.graph_stats is not None:
            facts["graph"] = output.graph_stats.mode
        self._span(f"step {plan.step_id}", DRIVER, lane, planned, done, facts)
        self._span("schedule", DRIVER, lane, planned, sent)
        self._span("execute", DRIVER, lane, sent, landed)
        self._span("update", DRIVER, lane, landed, done)

    def ended(self, outputs: Iterable[EngineOutput]) -> None:
        """Add the life of each request that ended. Called by the engine core."""
        if self._failed:
            return
        for output in outputs:
            if output.metrics is not None:
                self._life(output, output.metrics)

    def collect(self, core: EngineCore) -> None:
        """Add what the workers noted, portion by portion. Says what is missing if they fail."""
        whole = False
        while not whole and not self._failed:
            try:
                ranks: Sequence[tuple[int, list[Span]]] = core.executor.collective_rpc(
                    SPANS, args=(PORTION,), timeout=COLLECT_SECONDS
                )
            except HardpointError as error:
                self.lacks_workers(f"{type(error).__name__}: {error}")
                return
            for rank, (dropped, spans) in enumerate(ranks):
                self._rank(rank, dropped, spans)
            whole = all(len(spans) < PORTION for _, spans in ranks)

    def lacks_workers(self, why: str) -> None:
        """Say that what the workers noted is not in it, and write all that is."""
        what = f"steps of the workers are missing: {why}"
        self._missing(DRIVER, time.monotonic(), what)
        self._safely(self._file.flush)

    def close(self) -> None:
        """Complete the file."""
        self._safely(self._file.close)

    def _life(self, output: EngineOutput, metrics: RequestMetrics) -> None:
        begin, end = metrics.arrival, metrics.finished
        lane = self._lane(REQUESTS, begin, end, "lane")
        facts = {
            "finish_reason": output.finish_reason,
            "prompt_tokens": metrics.num_prompt_tokens,
            "output_tokens": metrics.num_generation_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "preemptions": metrics.num_preemptions,
        }
        self._span(f"request {output.req_id}", REQUESTS, lane, begin, end, facts)
        scheduled = end if metrics.first_scheduled is None else metrics.first_scheduled
        self._span("queued", REQUESTS, lane, begin, scheduled)
        if metrics.first_scheduled is not None:
            first = end if metrics.first_token is None else metrics.first_token
            self._span("prefill", REQUESTS, lane, scheduled, first)
            if metrics.first_token is not None:
                self._span("decode", REQUESTS, lane, first, end)

    def _rank(self, rank: int, dropped: int, spans: Sequence[Span]) -> None:
        process = FIRST_RANK + rank
        if process not in self._lanes:
            self._lanes[process] = []
            self._name("process_name", process, 0, f"rank {rank}")
        if dropped:
            at = spans[0][1] if spans else time.monotonic()
            self._missing(process, at, f"the first {dropped} steps of rank {rank} are missing")
        for step_id, begin, end, phases in spans:
            lane = self._lane(process, begin, end, "steps")
            self._span(f"step {step_id}", process, lane, begin, end)
            at = begin
            for name, seconds in zip(("prepare", "forward", "sample"), phases or (), strict=False):
                until = min(end, at + seconds)
                self._span(name, process, lane, at, until)
                at = until

    def _lane(self, process: int, begin: float, end: float, name: str) -> int:
        """Return the first thread of ``process`` that is free from ``begin`` to ``end``: spans of
        one thread must not cross.
        """
        ends = self._lanes.setdefault(process, [])
        for lane, busy in enumerate(ends):
            if busy <= begin:
                ends[lane] = end
                return lane
        ends.append(end)
        self._name("thread_name", process, len(ends) - 1, f"{name} {len(ends)}")
        return len(ends) - 1

    def _span(
        self,
        name: str,
        process: int,
        lane: int,
        begin: float,
        end: float,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        start = round(begin * 1e6, 1)
        self._event(
            {
                "name": name,
                "ph": "X",
                "pid": process,
                "tid": lane,
                "ts": start,
                "dur": round(max(0.0, round(end * 1e6, 1) - start), 1),
                "args": dict(facts or {}),
            }
        )

    def _name(self, kind: str, process: int, lane: int, name: str) -> None:
        self._event({"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}})

    def _missing(self, process: int, at: float, what: str) -> None:
        """Say in the log, and at a moment of the trace, what it lacks."""
        _logger.warning("the trace %s is incomplete: %s", self._path, what)
        moment = {"ph": "i", "s": "g", "pid": process, "tid": 0, "ts": round(at * 1e6, 1)}
        self._event({"name": what, **moment})

    def _event(self, event: Mapping[str, Any]) -> None:
        self._safely(partial(self._file.add, event))

    def _safely(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        _logger.error(
            "the trace %s ends here: it cannot be written: %s", self._path, error.strerror
        )
        with contextlib.suppress(OSError):
            self._file.close()
