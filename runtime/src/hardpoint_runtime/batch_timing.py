"""How long forwards take by the size of their batch: told in the log, where it is asked for."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator

from hardpoint_runtime.device import DeviceOps

_logger = logging.getLogger("hardpoint.batches")


class BatchTiming:
    """Measures forwards and logs, every ``interval`` seconds, how many there were of each size and
    the median of their times.

    Built by the runner where the key ``batch_timing_interval`` is set; without it nothing waits for
    the device. ``clock()`` gives seconds.
    """

    def __init__(
        self, interval: float, device: DeviceOps, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.interval = interval
        self.device = device
        self.clock = clock
        self.seconds: dict[int, list[float]] = {}
        self._told = clock()

    @contextlib.contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """Measure what is done inside, until the device has done it, as a batch of ``num_tokens``.
        What raises is not measured.
        """
        self.device.synchronize()  # what was given before is not this batch's
        started = self.clock()
        yield
        self.device.synchronize()
        ended = self.clock()
        self.seconds.setdefault(num_tokens, []).append(ended - started)
        if ended - self._told >= self.interval:
            self._tell(ended)

    def text(self) -> str:
        """Return what there is to tell: tokens, number of batches, median in milliseconds."""
        return ", ".join(
            f"{size} tokens: {len(times)} x {statistics.median(times) * 1e3:.3f} ms"
            for size, times in sorted(self.seconds.items())
        )

    def _tell(self, now: float) -> None:
        # It was asked for by a key of its own: whatever the level of the log, it is shown.
        level = max(logging.INFO, _logger.getEffectiveLevel())
        _logger.log(level, "batches of the last %.1f s: %s", now - self._told, self.text())
        self.seconds.clear()
        self._told = now
