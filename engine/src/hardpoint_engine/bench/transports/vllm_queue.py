"""vLLM's ``MessageQueue`` as its own multiprocess executor uses it: one queue from the driver to
all workers, one from each worker back, with the default sizes. A large payload is an array, whose
buffer travels apart; every worker copies it out.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class Transport:
    """Puts (method, args, kwargs, rank) into the queue, then takes every worker's answer."""

    arrays = True

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._queue_class = _queue_class()
        self._workers: list[BaseProcess] = []
        self._calls: Any = None
        self._answers: list[Any] = []

    def start(self, workers: int) -> None:
        """Fork the workers, before there is a queue, and hand each its ends."""
        forking = multiprocessing.get_context("fork")
        lanes = []
        for rank in range(workers):
            ours, theirs = forking.Pipe()
            worker = forking.Process(target=_work, args=(theirs, rank), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            lanes.append(ours)
        self._calls = self._queue_class(workers, workers)
        for lane in lanes:
            lane.send(self._calls.export_handle())
        self._answers = [self._queue_class.create_from_handle(lane.recv(), 0) for lane in lanes]
        for queue in (self._calls, *self._answers):
            queue.wait_until_ready()

    def call(self, payload: Any) -> list[int]:
        """Call every worker and return the answers."""
        self._calls.enqueue(("receive", (payload,), {}, None))
        return [queue.dequeue(indefinite=True) for queue in self._answers]

    def stop(self) -> None:
        """End the workers."""
        self._calls.enqueue(None)
        for worker in self._workers:
            worker.join()
        self._workers, self._answers, self._calls = [], [], None

    def close(self) -> None:
        """End what is left: nothing."""


def _queue_class() -> Any:
    module = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    return module.MessageQueue


def _work(lane: Connection[Any, Any], rank: int) -> None:
    queue_class = _queue_class()
    calls = queue_class.create_from_handle(lane.recv(), rank)
    answers = queue_class(1, 1)
    lane.send(answers.export_handle())
    for queue in (calls, answers):
        queue.wait_until_ready()
    while (message := calls.dequeue(indefinite=True)) is not None:
        _, (payload,), _, _ = message
        answers.enqueue(int(payload[-1]))
