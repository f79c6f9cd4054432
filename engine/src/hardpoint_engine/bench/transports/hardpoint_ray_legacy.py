"""The executor ``ray_legacy`` on the dummy platform. Only steps go by its compiled graph: so each
call is one, of no tokens, which carries the payload.
"""

from __future__ import annotations

import importlib
from typing import Any

from hardpoint.messages import SchedulerOutput

from hardpoint_engine.bench.launching import NAME, Installed, start_dummy


class Transport:
    """Has every actor execute a step that is numbered by the payload's last byte, and returns the
    numbers of the steps that were executed.
    """

    arrays = True

    def __init__(self) -> None:
        for name in ("ray", "hardpoint_ray"):
            importlib.import_module(name)
        self._installed = Installed()
        self._core: Any = None
        self._collective_rpc: Any = None

    def start(self, workers: int) -> None:
        """Start the workers, and Ray before."""
        self._core = start_dummy(workers, "ray_legacy")
        self._collective_rpc = self._core.executor.collective_rpc

    def call(self, payload: Any) -> list[int]:
        """Execute a step on every worker and return the answers."""
        step = SchedulerOutput(step_id=int(payload[-1]), extra={NAME: payload})
        return [each.step_id for each in self._collective_rpc("execute_model", args=(step,))]

    def stop(self) -> None:
        """End the workers, and Ray after."""
        self._core.shutdown()

    def close(self) -> None:
        """End what is left."""
        self._installed.close()
