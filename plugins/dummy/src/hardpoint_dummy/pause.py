"""Waiting that the driver can end."""

from __future__ import annotations

import time
from collections.abc import Callable

from hardpoint.errors import CancelledStepError

_SLICE = 0.005


def pause(seconds: float, cancelled: Callable[[], bool]) -> None:
    """Wait ``seconds`` as fake work does; raise CancelledStepError once the driver gives it up."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if cancelled():
            raise CancelledStepError("the driver ended this work before it was complete")
        time.sleep(min(left, _SLICE))
