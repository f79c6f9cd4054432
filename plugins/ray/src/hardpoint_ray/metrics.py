"""Metrics of Ray, with the methods of the usual client library (row R7).

Ray collects them in every process of its cluster and exports them with its own. A replica of a
service tells its own apart by a label, where Ray Serve runs it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray.util.metrics
from hardpoint.messages import ModelRunnerOutput, SchedulerOutput

REPLICA = "ReplicaId"
"""The label that tells replicas apart."""
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def sanitized(name: str) -> str:
    """Return ``name`` with ``_`` for what Ray allows in none."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


class _Metric:
    """What the three kinds share: a name, label names, and a child for each set of values."""

    def __init__(self, metric: Any, labels: Sequence[str], values: Mapping[str, str]) -> None:
        self._metric = metric
        self._labels = tuple(labels)
        self.values = dict(values)

    def labels(self, *values: object, **named: object) -> Self:
        """Return the metric for these values of its labels, in order or by name.

        Raises ValueError for another number of values, or other names.
        """
        given = {**dict(zip(self._labels, values, strict=False)), **named}
        if len(values) + len(named) != len(self._labels) or set(given) != set(self._labels):
            raise ValueError(
                f"labels {list(self._labels)} need one value each, not {[*values]} and {named}"
            )
        tags = {name: str(value) for name, value in given.items()}
        child = copy.copy(self)
        child.values = {**self.values, **tags}
        return child


def _made(kind: Any, name: str, about: str, labels: Sequence[str], **more: Any) -> Any:
    return kind(sanitized(name), description=about, tag_keys=(*labels, REPLICA), **more)


class Counter(_Metric):
    """Only grows."""

    def __init__(self, name: str, about: str = "", labels: Sequence[str] = ()) -> None:
        made = _made(ray.util.metrics.Counter, name, about, labels)
        super().__init__(made, labels, {REPLICA: replica()})

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``; nothing for none."""
        if amount:
            self._metric.inc(amount, tags=self.values)


class Gauge(_Metric):
    """Has its last value."""

    def __init__(self, name: str, about: str = "", labels: Sequence[str] = ()) -> None:
        made = _made(ray.util.metrics.Gauge, name, about, labels)
        super().__init__(made, labels, {REPLICA: replica()})

    def set(self, value: float) -> None:
        """Set it."""
        self._metric.set(value, tags=self.values)


class Histogram(_Metric):
    """Counts what was at most each of ``bounds``."""

    def __init__(
        self,
        name: str,
        about: str = "",
        labels: Sequence[str] = (),
        bounds: Sequence[float] = SECONDS,
    ) -> None:
        made = _made(ray.util.metrics.Histogram, name, about, labels, boundaries=list(bounds))
        super().__init__(made, labels, {REPLICA: replica()})

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self._metric.observe(value, tags=self.values)


def replica() -> str:
    """Return the id of the replica that this process is of, empty without Ray Serve."""
    try:
        from ray import serve

        return str(serve.get_replica_context().replica_id.unique_id)
    except Exception:  # noqa: BLE001 - no Serve, or no replica: it says so in several ways
        return ""


class StepMetrics:
    """What the executor tells Ray of its steps."""

    def __init__(self) -> None:
        self._steps = Counter("hardpoint_steps", "steps that were planned")
        self._tokens = Counter("hardpoint_tokens", "tokens by what they were", ("kind",))
        self._seconds = Histogram("hardpoint_step_seconds", "from a step's call to its output")
        self._failures = Counter("hardpoint_failures", "executors that failed")

    def step(self, planned: SchedulerOutput, output: object, seconds: float) -> None:
        """Count one step."""
        self._steps.inc()
        self._tokens.labels(kind="computed").inc(planned.total_tokens)
        self._seconds.observe(seconds)
        self.gave(output)

    def gave(self, output: object) -> None:
        """Count the tokens that a step gave; none yet where its sampling is deferred."""
        if isinstance(output, ModelRunnerOutput):
            self._tokens.labels(kind="sampled").inc(sum(map(len, output.tokens)))

    def failed(self, error: BaseException) -> None:
        """Count a failure."""
        self._failures.inc()
