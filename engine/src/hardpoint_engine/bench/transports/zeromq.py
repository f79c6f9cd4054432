"""pyzmq, a pair of sockets for each worker over a local path, multipart messages of plain bytes:
nothing is encoded, and a large payload is not copied on the driver's side.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
from multiprocessing.process import BaseProcess
from typing import Any

UNCOPIED = 65536
"""Bytes from which pyzmq itself sends a frame without a copy, unless told otherwise."""


class Transport:
    """Sends [method, payload] to every worker, then receives every answer."""

    arrays = False

    def __init__(self) -> None:
        self._zmq: Any = importlib.import_module("zmq")
        self._workers: list[BaseProcess] = []
        self._sockets: list[Any] = []
        self._context: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")

    def start(self, workers: int) -> None:
        """Fork the workers, before there is a thread, and connect them."""
        addresses = [f"ipc://{self._folder.name}/{rank}" for rank in range(workers)]
        forking = multiprocessing.get_context("fork")
        for address in addresses:
            worker = forking.Process(target=_work, args=(address,), daemon=True)
            worker.start()
            self._workers.append(worker)
        self._context = self._zmq.Context()
        for address in addresses:
            socket = self._context.socket(self._zmq.PAIR)
            socket.bind(address)
            self._sockets.append(socket)

    def call(self, payload: Any) -> list[int]:
        """Call every worker and return the answers."""
        copy = len(payload) < UNCOPIED
        for socket in self._sockets:
            socket.send_multipart((b"receive", payload), copy=copy)
        return [socket.recv()[0] for socket in self._sockets]

    def stop(self) -> None:
        """End the workers."""
        for socket in self._sockets:
            socket.send_multipart((b"stop", b""))
        for worker in self._workers:
            worker.join()
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        self._workers, self._sockets = [], []

    def close(self) -> None:
        """End what is left."""
        self._folder.cleanup()


def _work(address: str) -> None:
    zmq = importlib.import_module("zmq")
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    while True:
        method, payload = socket.recv_multipart()
        if method == b"stop":
            break
        socket.send(payload[-1:])
    socket.close(0)
    context.term()
