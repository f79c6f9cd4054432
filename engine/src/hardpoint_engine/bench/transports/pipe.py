"""``multiprocessing.Pipe``, one for each worker: the message is sent to each, then each answer is
received. Both ends wait in the kernel.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class Transport:
    """Sends (method, args, kwargs) as ``Connection.send`` does."""

    arrays = False

    def __init__(self) -> None:
        self._workers: list[BaseProcess] = []
        self._connections: list[Connection[Any, Any]] = []

    def start(self, workers: int) -> None:
        """Fork the workers."""
        context = multiprocessing.get_context("fork")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._connections.append(ours)

    def call(self, payload: Any) -> list[int]:
        """Call every worker and return the answers."""
        message: Any = ("receive", (payload,), {})
        for connection in self._connections:
            connection.send(message)
        return [connection.recv() for connection in self._connections]

    def stop(self) -> None:
        """End the workers."""
        for connection in self._connections:
            connection.send(None)
            connection.close()
        for worker in self._workers:
            worker.join()
        self._workers, self._connections = [], []

    def close(self) -> None:
        """End what is left: nothing."""


def _work(connection: Connection[Any, Any]) -> None:
    while (message := connection.recv()) is not None:
        _, (payload,), _ = message
        connection.send(payload[-1])
