"""What is asked of Ray at the end, when nobody knows whether it still answers: some of its calls
wait for its head for a minute, and end the program then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LEAST_SECONDS = 2.0
"""How long an answer is awaited, however late it is."""

_logger = logging.getLogger("hardpoint.executor.ray")


class Asking:
    """Has Ray do one thing after the other, until a time (monotonic s). Once it has not done one by
    then, it is ``silent``, and nothing more is asked of it.
    """

    def __init__(self, until: float) -> None:
        self._until = until
        self.silent = False

    def __call__(self, what: str, ask: Callable[[], object]) -> None:
        """Have Ray do ``what``, by ``ask()``, on a thread of its own. What that raises is told."""
        if self.silent:
            return
        done = threading.Event()

        def run() -> None:
            try:
                ask()
            except Exception as error:  # noqa: BLE001 - there is nobody who could do more
                _logger.debug("Ray was to %s: %s", what, error)
            done.set()

        threading.Thread(target=run, name="hardpoint-ray-asking", daemon=True).start()
        if not done.wait(max(LEAST_SECONDS, self._until - time.monotonic())):
            self.silent = True
            _logger.warning("Ray was to %s and does not answer; what it has is left to it", what)
