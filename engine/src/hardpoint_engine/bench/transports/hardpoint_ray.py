"""The executor ``ray`` on the dummy platform, as :mod:`hardpoint_mp` has ``mp``: on a Ray that is
started for this alone, and through the public ``collective_rpc``.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from hardpoint_engine.bench.launching import METHOD, Installed, start_dummy


class Transport:
    """Calls by name a method that an extension offers, in every actor."""

    arrays = True
    executor: ClassVar[str] = "ray"

    def __init__(self) -> None:
        for name in ("ray", "hardpoint_ray"):
            importlib.import_module(name)
        self._installed = Installed()
        self._core: Any = None
        self._collective_rpc: Any = None

    def start(self, workers: int) -> None:
        """Start the workers, and Ray before."""
        self._core = start_dummy(workers, self.executor)
        self._collective_rpc = self._core.executor.collective_rpc

    def call(self, payload: Any) -> list[int]:
        """Call every worker and return the answers."""
        answers: list[int] = self._collective_rpc(METHOD, args=(payload,))
        return answers

    def stop(self) -> None:
        """End the workers, and Ray after."""
        self._core.shutdown()

    def close(self) -> None:
        """End what is left."""
        self._installed.close()
