"""Counters and histograms of one engine. Written by the engine core, under its lock, each step."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, define, field, fields, frozen
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput

from hardpoint_engine.graph_table import GraphTable
from hardpoint_engine.request import EngineOutput, RequestMetrics
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.roster import Roster

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets for times."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Upper bounds of the buckets for the tokens of a step."""


@define
class Histogram:
    """How many observations were at most each bound, the last count being those above all."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean, or None."""
        return self.total / self.count if self.count else None

    def observe(self, value: float | None) -> None:
        """Count ``value``; None is no observation."""
        if value is None:
            return
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


@frozen(kw_only=True)
class EngineGauges:
    """How full the engine is at one moment."""

    running: int
    waiting: int
    blocks_held: int
    blocks_usable: int

    @classmethod
    def of(cls, roster: Roster, blocks: KVBlocks) -> EngineGauges:
        """Look at the engine's parts."""
        pool = blocks.pool
        return cls(
            running=len(roster.running),
            waiting=len(roster.waiting),
            blocks_held=pool.num_usable - pool.num_free,
            blocks_usable=pool.num_usable,
        )


def _seconds() -> Histogram:
    return Histogram(SECONDS)


@define(kw_only=True)
class EngineMetrics:
    """Totals since the engine started, and the gauges after the last step.

    ``computed_tokens`` went through the model, prompts and answers, recomputation included;
    ``generated_tokens`` came out. ``queried_tokens`` of prompts were looked for in the prefix cache
    and ``cached_tokens`` found. ``finished`` counts requests by finish reason. Histograms are in
    seconds, ``step_tokens`` in tokens. ``graphs`` has the steps by padding and graph mode.
    """

    requests: int = 0
    finished: dict[str, int] = field(factory=dict)
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    step_seconds: Histogram = field(factory=_seconds)
    step_tokens: Histogram = field(factory=lambda: Histogram(TOKENS))
    queue_time: Histogram = field(factory=_seconds)
    time_to_first_token: Histogram = field(factory=_seconds)
    time_per_output_token: Histogram = field(factory=_seconds)
    e2e_latency: Histogram = field(factory=_seconds)
    graphs: GraphTable = field(factory=GraphTable)
    gauges: EngineGauges | None = None

    @property
    def cache_hit_rate(self) -> float | None:
        """The share of prompt tokens that the prefix cache had, or None before any prompt."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else None

    def step_done(
        self, plan: SchedulerOutput, output: ModelRunnerOutput | None, seconds: float
    ) -> None:
        """Count one step; ``output`` None: it failed."""
        self.steps += 1
        self.step_seconds.observe(seconds)
        self.step_tokens.observe(plan.total_tokens)
        if output is None:
            self.failed_steps += 1
        else:
            self.computed_tokens += plan.total_tokens
            self.graphs.add(output.graph_stats)

    def outputs_given(self, outputs: Iterable[EngineOutput]) -> None:
        """Count what is handed to the caller."""
        for output in outputs:
            self.generated_tokens += len(output.new_tokens)
            if output.finish_reason is not None:
                reason = output.finish_reason
                self.finished[reason] = self.finished.get(reason, 0) + 1
                if output.metrics is not None:
                    self._request_done(output.metrics)

    def _request_done(self, metrics: RequestMetrics) -> None:
        self.queue_time.observe(metrics.queue_time)
        self.time_to_first_token.observe(metrics.time_to_first_token)
        self.time_per_output_token.observe(metrics.time_per_output_token)
        self.e2e_latency.observe(metrics.e2e_latency)

    def look(self, roster: Roster, blocks: KVBlocks) -> None:
        """Take over what the scheduler's parts count themselves."""
        self.preemptions = roster.num_preemptions
        self.gauges = EngineGauges.of(roster, blocks)
        if blocks.prefix is not None:
            self.queried_tokens = blocks.prefix.stats.queried_tokens
            self.cached_tokens = blocks.prefix.stats.hit_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON and logs."""
        plain: dict[str, Any] = {}
        for attribute in fields(EngineMetrics):
            value = getattr(self, attribute.name)
            if isinstance(value, Histogram | GraphTable):
                plain[attribute.name] = value.as_dict()
            elif isinstance(value, EngineGauges):
                plain |= asdict(value)
            elif value is not None:
                plain[attribute.name] = dict(value) if isinstance(value, dict) else value
        return plain
