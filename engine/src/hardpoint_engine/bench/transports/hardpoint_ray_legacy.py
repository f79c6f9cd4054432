"""The executor ``ray_legacy``, as :mod:`hardpoint_ray` has ``ray``. Only steps go by its compiled
graph: so each call is one, of no tokens, which carries the payload.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hardpoint.messages import SchedulerOutput

from hardpoint_engine.bench.launching import NAME
from hardpoint_engine.bench.transports import hardpoint_ray


class Transport(hardpoint_ray.Transport):
    """Has every actor execute a step that is numbered by the payload's last byte, and returns the
    numbers of the steps that were executed.
    """

    executor: ClassVar[str] = "ray_legacy"

    def call(self, payload: Any) -> list[int]:
        """Execute a step on every worker and return the answers."""
        step = SchedulerOutput(step_id=int(payload[-1]), extra={NAME: payload})
        return [each.step_id for each in self._collective_rpc("execute_model", args=(step,))]
