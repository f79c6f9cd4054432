"""Ray's compiled graphs: the actors of :mod:`ray_actors`, called by channels that are made once."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

LARGEST = 1 << 24
"""Bytes of the channels' buffers: more than any payload here."""
STORE_BYTES = 1 << 29
PATIENCE = 120.0
"""Seconds for a call: its first one takes half a minute on a machine with much beside."""


class Transport:
    """Executes a graph of one method of every actor, then gets every answer."""

    arrays = True

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._ray: Any = importlib.import_module("ray")
        self._dag: Any = importlib.import_module("ray.dag")
        self._ray.init(
            address="local",  # else it joins one that somebody else has on this host
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
        )
        self._actors: list[Any] = []
        self._graph: Any = None

    def start(self, workers: int) -> None:
        """Start the actors and compile the graph."""
        remote = self._ray.remote(num_cpus=0)(_Receiver)
        self._actors = [remote.remote() for _ in range(workers)]
        with self._dag.InputNode() as given:
            outputs = [each.receive.bind(given) for each in self._actors]
            graph = self._dag.MultiOutputNode(outputs)
        self._graph = graph.experimental_compile(_buffer_size_bytes=LARGEST)
        self.call(b"\0")

    def call(self, payload: Any) -> list[int]:
        """Run the graph once and return the answers."""
        answers: list[int] = self._ray.get(self._graph.execute(payload), timeout=PATIENCE)
        return answers

    def stop(self) -> None:
        """End the graph and the actors."""
        self._graph.teardown()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._graph = [], None

    def close(self) -> None:
        """End the cluster."""
        self._ray.shutdown()


class _Receiver:
    def receive(self, payload: Any) -> int:
        return int(payload[-1])
