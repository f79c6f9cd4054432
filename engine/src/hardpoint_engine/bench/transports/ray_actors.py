"""Ray actors on a local cluster that is started for this alone. A large payload is put into the
object store once and read there by every actor, as an array, without a copy.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

STORE_BYTES = 1 << 29
PUT = 100 * 1024
"""Bytes from which an argument goes through the object store; Ray inlines smaller ones."""


class Transport:
    """Calls a method of every actor, then gets every answer."""

    arrays = True

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._ray: Any = importlib.import_module("ray")
        self._ray.init(
            address="local",  # else it joins one that somebody else has on this host
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
        )
        self._actors: list[Any] = []

    def start(self, workers: int) -> None:
        """Start the actors."""
        remote = self._ray.remote(num_cpus=0)(_Receiver)
        self._actors = [remote.remote() for _ in range(workers)]
        self.call(b"\0")

    def call(self, payload: Any) -> list[int]:
        """Call every actor and return the answers."""
        sent = self._ray.put(payload) if len(payload) >= PUT else payload
        answers: list[int] = self._ray.get([each.receive.remote(sent) for each in self._actors])
        return answers

    def stop(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def close(self) -> None:
        """End the cluster."""
        self._ray.shutdown()


class _Receiver:
    def receive(self, payload: Any) -> int:
        return int(payload[-1])
