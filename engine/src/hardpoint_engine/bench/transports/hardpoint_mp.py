"""The executor ``mp`` on the dummy platform, through the public ``collective_rpc``."""

from __future__ import annotations

from typing import Any

from hardpoint_engine.bench.launching import METHOD, Installed, start_dummy


class Transport:
    """Calls by name a method that an extension offers: the way of every call of the engine, with
    its checks, its deadlines and its health monitor.
    """

    arrays = True

    def __init__(self) -> None:
        self._installed = Installed()
        self._core: Any = None
        self._collective_rpc: Any = None

    def start(self, workers: int) -> None:
        """Start the workers."""
        self._core = start_dummy(workers)
        self._collective_rpc = self._core.executor.collective_rpc

    def call(self, payload: Any) -> list[int]:
        """Call every worker and return the answers."""
        answers: list[int] = self._collective_rpc(METHOD, args=(payload,))
        return answers

    def stop(self) -> None:
        """End the workers."""
        self._core.shutdown()

    def close(self) -> None:
        """End what is left."""
        self._installed.close()
