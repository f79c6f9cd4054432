"""What an engine does while nothing may run: it waits a little, and tells if that does not end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hardpoint_engine.scheduling.scheduler import Scheduler

_logger = logging.getLogger("hardpoint.engine")

IDLE_SECONDS = 0.001
"""How long a step waits when policies let nothing run, so that callers in a loop do not spin."""
PAUSED_SECONDS = 0.01
"""The same while scheduling sleeps."""
WAITING_SECONDS = 5.0
"""How long a policy may let nothing run before a warning names it."""
GIVE_WAY_SECONDS = 0.00005
"""How long a worker of this process may have the interpreter to begin a step that was just sent."""
LONG_STEP_SECONDS = 0.002
"""From how long a step on that is worth it: a shorter one ends before the last has been counted."""


def give_way(seconds: float) -> None:
    """Let a worker of this process begin a step, if one takes long: the last took ``seconds``."""
    if seconds > LONG_STEP_SECONDS:
        time.sleep(GIVE_WAY_SECONDS)


class Idling:
    """The steps in which there was nothing to do. Used by the thread that steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._warned = False

    def end(self) -> None:
        """Note that something runs."""
        self._since = None

    def wait(self, scheduler: Scheduler, *, paused: bool, preparing: bool) -> None:
        """Wait a little. Requests that no policy lets run wait for ever: say so, once; not while
        the engine is ``paused``, nor while requests are ``preparing``.
        """
        now = self._clock()
        if self._since is None or preparing or paused:
            self._since = now
        elif now - self._since > WAITING_SECONDS and not self._warned:
            self._warned = True
            policy = type(scheduler.admission)
            _logger.warning(
                "for %.0f s nothing has run: %d requests wait, and the admission policy %s.%s lets "
                "none of them start", now - self._since, len(scheduler.roster),
                policy.__module__, policy.__qualname__,
            )  # fmt: skip
        time.sleep(PAUSED_SECONDS if paused else IDLE_SECONDS)
