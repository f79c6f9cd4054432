"""Fake traces: one JSON file per rank with an event for each step, in the Chrome trace format."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint.messages import SchedulerOutput


class StepTrace:
    """Records steps between start and stop; writes ``FOLDER/PREFIX-rank-N.json`` when stopped."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._prefix: str | None = None
        self._skip = 0
        self._left: int | None = None
        self._events: list[dict[str, object]] = []

    def start(self, prefix: str | None, delay: int, most: int | None) -> None:
        """Record from ``delay`` steps on, at most ``most`` steps; starting twice changes nothing.
        Raises ConfigError if no folder is configured.
        """
        if self._folder is None:
            raise ConfigError("profiling writes files: set plugins.dummy.trace_folder first")
        if self._prefix is None:
            self._prefix, self._skip, self._left = prefix or "trace", delay, most

    @contextmanager
    def step(self, plan: SchedulerOutput) -> Iterator[None]:
        """Record one step, if it is to be recorded."""
        started = time.perf_counter()
        yield
        if self._prefix is None or self._left == 0:
            return
        if self._skip:
            self._skip -= 1
            return
        if self._left is not None:
            self._left -= 1
        seconds = time.perf_counter() - started
        self._events.append(
            {
                "name": f"step {plan.step_id}", "ph": "X", "pid": self._rank, "tid": 0,
                "ts": started * 1e6, "dur": seconds * 1e6, "args": {"tokens": plan.total_tokens},
            }
        )  # fmt: skip

    def close(self) -> None:
        """Stop, and write the file. Does nothing if it was not started."""
        if self._prefix is None or self._folder is None:
            return
        path = Path(self._folder) / f"{self._prefix}-rank-{self._rank}.json"
        self._prefix = None
        path.write_text(json.dumps({"traceEvents": self._events}), encoding="utf-8")
        self._events = []
