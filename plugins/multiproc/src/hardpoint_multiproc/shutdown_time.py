"""How the time of a shutdown is shared out."""

from __future__ import annotations


def shares(now: float, deadline: float, *, failed: bool) -> tuple[float, float]:
    """Return when SIGTERM and when SIGKILL is due, for a shutdown that may last from ``now`` to
    ``deadline`` (monotonic s).

    Nearly all of the time is the workers' own: one that needs less than the deadline to shut down
    finishes. Of a group that has failed, nobody waits for much.
    """
    span = max(0.0, deadline - now)
    if failed:
        span = min(span, 1.0)
    kill = now + span - min(0.3, 0.1 * span)
    return kill - min(0.7, 0.2 * span), kill
