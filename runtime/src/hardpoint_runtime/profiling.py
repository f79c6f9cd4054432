"""One rank's profile of its steps: a trace file that names each step by what it computed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.messages import SchedulerOutput

    from hardpoint_runtime.device import DeviceOps

_logger = logging.getLogger("hardpoint.worker")


class StepProfiler:
    """Records steps between start and stop; writes ``FOLDER/PREFIX-rank-N.json``.

    Owned by the worker, used on its thread alone. Raises ConfigError if no folder is configured.
    """

    def __init__(self, device: DeviceOps, folder: str | None, rank: int) -> None:
        if folder is None:
            raise ConfigError(
                "profile_folder is not set: name the folder for traces (--profile-folder)"
            )
        self._device = device
        self._folder = Path(folder)
        self._rank = rank
        self._path: Path | None = None
        self._running: Any = None
        self._skip = 0
        self._left: int | None = None

    @property
    def active(self) -> bool:
        """Whether it was started and has not come to its end."""
        return self._path is not None

    def start(self, prefix: str | None, delay: int, most: int | None) -> None:
        """Record from ``delay`` steps on, at most ``most`` steps. Started twice, it goes on as it
        was.
        """
        if self.active:
            _logger.info("rank %d: a profile is being taken; this start is ignored", self._rank)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{prefix or 'trace'}-rank-{self._rank}.json"
        self._skip, self._left = delay, most

    @contextlib.contextmanager
    def step(self, plan: SchedulerOutput) -> Iterator[None]:
        """Record one step, named by what it computes, if it is to be recorded."""
        if not self.active or self._skip:
            self._skip = max(0, self._skip - 1)
            yield
            return
        if self._running is None:
            self._running = self._device.profiler()
            self._running.start()
        with self._device.annotation(step_name(plan)):
            yield
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self._end()

    def stop(self) -> None:
        """Write the trace. Not started, or ended by its limit, it warns and does nothing."""
        if not self.active:
            _logger.warning("rank %d: no profile is being taken; there is none to stop", self._rank)
            return
        self._end()

    def _end(self) -> None:
        running, path = self._running, self._path
        self._running = self._path = None
        if running is None or path is None:
            _logger.warning("rank %d: the profile has no step, and no file", self._rank)
            return
        self._device.synchronize()
        running.stop()
        running.export_chrome_trace(str(path))
        _logger.info("rank %d: profile written to %s", self._rank, path)


def step_name(plan: SchedulerOutput) -> str:
    """Return ``context n / generation m``: the tokens that a step computes because they are known,
    of prompts and of what was computed before a preemption, and those that answers grow by.
    """
    answering = {
        req_id
        for req_id, num_output in zip(plan.running.req_ids, plan.running.num_output, strict=False)
        if num_output and req_id not in plan.running.resumed
    }
    context = generation = 0
    for req_id, count in plan.num_tokens.items():
        if req_id in answering and count == 1 + len(plan.drafts.get(req_id, ())):
            generation += count
        else:
            context += count
    return f"context {context} / generation {generation}"
