"""The driver of one transport, as ``orders.py`` runs it: of Hardpoint it needs nothing."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

ALONE = False
"""Whether its process has no other ones, which it would have to end."""
ARRAY = 1 << 20
"""Bytes from which a payload is an array, where a transport sends an array's memory apart."""
WARM_UP_SHARE = 0.25
"""Of a turn's seconds, at most, for calls that do not count."""


class Transport(Protocol):
    """What a file of ``transports`` has a class of."""

    arrays: bool
    """Whether it sends the memory of an array apart from the rest of a message."""

    def start(self, workers: int) -> None:
        """Start that many workers."""

    def call(self, payload: Any) -> list[int]:
        """Send ``payload`` to every worker; return what each answers: its last byte."""

    def stop(self) -> None:
        """End the workers."""

    def close(self) -> None:
        """End whatever else was started."""


class WrongAnswerError(Exception):
    """The workers did not all answer with the last byte of what was sent."""


def payloads(size: int, arrays: bool) -> list[tuple[Any, int]]:
    """Return two payloads of ``size`` bytes, each with its last byte, to be sent in turn: an answer
    to the wrong one is seen.
    """
    contents = [(bytes(size - 1) + bytes((last,)), last) for last in (7, 93)]
    if not arrays or size < ARRAY:
        return list(contents)
    numpy = importlib.import_module("numpy")
    return [(numpy.frombuffer(bytearray(data), numpy.uint8), last) for data, last in contents]


def take_turn(
    call: Callable[[Any], list[int]],
    sent: list[tuple[Any, int]],
    *,
    workers: int,
    warm_ups: int,
    calls: int,
    seconds: float,
    every: float,
) -> dict[str, Any]:
    """Call until ``calls`` calls were made or ``seconds`` have passed, each at least ``every``
    seconds after the one before; up to ``warm_ups`` calls before that do not count. Return the
    times in ns and when the last call ended (monotonic s). Raises WrongAnswerError.
    """
    clock = time.perf_counter_ns
    warm = clock() + int(seconds * WARM_UP_SHARE * 1e9)
    warmed = 0
    while warmed < warm_ups and (not warmed or clock() < warm):
        call(sent[warmed & 1][0])
        warmed += 1
    times: list[int] = []
    end = clock() + int(seconds * 1e9)
    wanted = [[last] * workers for _, last in sent]
    for number in range(calls):
        payload, _ = sent[number & 1]
        begin = clock()
        answers = call(payload)
        times.append(clock() - begin)
        if answers != wanted[number & 1]:
            raise WrongAnswerError(f"answers {answers}, not {wanted[number & 1]}")
        if clock() >= end:
            break
        if every:
            time.sleep(max(0.0, every - (clock() - begin) / 1e9))
    return {"times": times, "ended": time.monotonic(), "calls": len(times) + warmed}


class Orders:
    """Does what it is told, by the name of the order."""

    about: ClassVar[dict[str, Any]] = {}

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._workers = 0
        self._sent: dict[int, list[tuple[Any, int]]] = {}

    def start(self, workers: int) -> dict[str, Any]:
        """Start the workers."""
        self._transport.start(workers)
        self._workers = workers
        return {}

    def turn(self, size: int, **how: Any) -> dict[str, Any]:
        """Make calls with payloads of ``size`` bytes."""
        sent = self._sent.get(size) or payloads(size, self._transport.arrays)
        self._sent[size] = sent
        return take_turn(self._transport.call, sent, workers=self._workers, **how)

    def stop(self) -> dict[str, Any]:
        """End the workers."""
        self._sent.clear()
        self._transport.stop()
        return {}

    def close(self) -> None:
        """End whatever else was started."""
        self._transport.close()


def orders(load_file: Callable[[str, str], Any], path: str) -> Orders:
    """Return what does the orders by the transport of a file. Raises ImportError if its library is
    not installed.
    """
    return Orders(load_file(path, "transport").Transport())
