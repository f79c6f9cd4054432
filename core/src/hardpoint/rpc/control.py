"""The control lane: what driver and worker tell each other past the calls.

A pair of sockets for each worker that carries small messages of fixed size, each complete or not
there; none is ever unpickled. In the worker a thread of its own answers, so a busy worker is heard;
one whose interpreter is held, or that was stopped, is not. The end of the lane is the end of the
driver: the worker then ends its own process group.

:class:`ControlLane` is the driver's end, :class:`ControlThread` the worker's.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from attrs import frozen

from hardpoint.isolation import log_error
from hardpoint.rpc.faults import LOSE, fault

if TYPE_CHECKING:
    from hardpoint.records import WorkerHealth

_logger = logging.getLogger("hardpoint.worker")

LONGEST_TEXT = 80
"""Bytes of a stage or a method's name that are told."""

_LONGEST_WAIT = 86400.0
_REPORT = struct.Struct(f"<Bqqdd{LONGEST_TEXT}s")
_ORDER = struct.Struct("<Bq")


class Sign(IntEnum):
    """What a worker reports."""

    HEARTBEAT = 1
    PONG = 2
    STAGE = 3


class Order(IntEnum):
    """What the driver wants of a worker, whatever it is doing."""

    PING = 1
    CANCEL = 2
    END_COLLECTIVES = 3


@frozen(kw_only=True)
class Report:
    """One sign of life.

    ``number`` is that of the ping that it answers (0: none). ``busy_since`` (monotonic s, None:
    idle), ``step_id`` and ``text`` (the method it is busy with, or the stage of its start) were
    written by the work loop. ``work`` is the seconds of processor time that the worker has used,
    this lane's thread apart: of a worker that computes, it grows.
    """

    sign: Sign
    number: int = 0
    step_id: int = -1
    busy_since: float | None = None
    work: float = 0.0
    text: str = ""

    def pack(self) -> bytes:
        """Return the message."""
        busy = math.nan if self.busy_since is None else self.busy_since
        text = self.text.encode(errors="replace")[:LONGEST_TEXT]
        return _REPORT.pack(self.sign, self.number, self.step_id, busy, self.work, text)

    @classmethod
    def unpack(cls, data: bytes) -> Report | None:
        """Return the report in ``data``, or None if it is none."""
        if len(data) != _REPORT.size or data[0] not in Sign.__members__.values():
            return None
        sign, number, step_id, busy, work, text = _REPORT.unpack(data)
        return cls(
            sign=Sign(sign),
            number=number,
            step_id=step_id,
            busy_since=None if math.isnan(busy) else busy,
            work=work,
            text=text.rstrip(b"\0").decode(errors="replace"),
        )


def lane() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new lane: the driver's and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ControlLane:
    """The driver's end. Orders may be given from any thread; one thread reads."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._end.fileno()

    def order(self, order: Order, number: int = 0) -> bool:
        """Give an order; False if it cannot be delivered: the worker is gone, or has not read for
        so long that the lane is full.
        """
        with self._lock:
            try:
                return self._end.send(_ORDER.pack(order, number)) == _ORDER.size
            except OSError:
                return False

    def reports(self) -> tuple[list[Report], bool]:
        """Return what has arrived, and whether the lane is still open."""
        found: list[Report] = []
        while True:
            try:
                data = self._end.recv(_REPORT.size + 1)
            except (BlockingIOError, InterruptedError):
                return found, True
            except OSError:
                return found, False
            if not data:
                return found, False
            if (report := Report.unpack(data)) is not None:  # what is none has no effect
                found.append(report)

    def close(self) -> None:
        """Close it; the worker takes that for the driver's end. Idempotent."""
        with self._lock:
            self._end.close()


class ControlThread:
    """The worker's end: a daemon thread that beats, answers and obeys.

    ``interval`` is the seconds between two heartbeats. ``cancelled`` is true from the driver's
    order to leave all work on. When the driver is gone, ``orphaned()`` is called: by default it
    ends this process's own group.
    """

    def __init__(
        self,
        end: socket.socket,
        interval: float,
        *,
        rank: int | None = None,
        orphaned: Callable[[], None] | None = None,
    ) -> None:
        end.setblocking(True)
        self._rank = rank
        self._end = end
        self._interval = interval
        self._orphaned = orphaned or end_own_group
        self._health: Callable[[], WorkerHealth] | None = None
        self._text: Callable[[], str] = str
        self._stage = ""
        self._cancelled = False
        self._own_time = 0.0
        self._end_collectives: Callable[[], None] | None = None
        self._collectives_ended = False
        self._obeying = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hardpoint-control", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stage(self, text: str) -> None:
        """Report that the start has come to the stage ``text``. Called by the work loop."""
        self._stage = text
        self._send(self._report(Sign.STAGE))

    def watch(self, health: Callable[[], WorkerHealth], text: Callable[[], str]) -> None:
        """Report ``health()`` and, as what it is busy with, ``text()`` from now on."""
        self._health, self._text = health, text

    def cancelled(self) -> bool:
        """Whether the driver wants this worker to leave its work at the next safe point."""
        return self._cancelled

    def on_end_collectives(self, end: Callable[[], None]) -> None:
        """Have ``end()`` called, on the control thread, when waits for other ranks shall end; at
        once if that was ordered already.
        """
        with self._obeying:
            self._end_collectives = end
            if self._collectives_ended:
                end()

    def before_shutdown(self) -> None:
        """Obey what the driver ordered so far; from now on ``end`` is called no more. Called by the
        work loop before the worker is shut down, which shall be the last that it hears.
        """
        with self._obeying:
            while self._obey_next():
                pass
            self._end_collectives = None

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        due = time.monotonic() + self._interval
        while True:
            wait = min(max(0.0, due - time.monotonic()), _LONGEST_WAIT)
            if poll.poll(math.ceil(wait * 1000)):
                with self._obeying:
                    obeyed = self._obey_next()
                if obeyed is None:
                    self._orphaned()
                    return
            now = time.monotonic()
            if now >= due:
                due = now + self._interval
                if fault.active and fault("heartbeat", self._rank) == LOSE:
                    continue
                self._send(self._report(Sign.HEARTBEAT))
            self._own_time = time.thread_time()

    def _obey_next(self) -> bool | None:
        """Return whether there was an order; None if the driver is gone."""
        try:
            data = self._end.recv(_ORDER.size + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return None
        if not data:
            return None
        if len(data) == _ORDER.size:  # what is no order has no effect
            order, number = _ORDER.unpack(data)
            if order == Order.PING:
                self._send(self._report(Sign.PONG, number))
            elif order in (Order.CANCEL, Order.END_COLLECTIVES):
                self._leave(order)
        return True

    def _leave(self, order: int) -> None:
        if order == Order.CANCEL:
            self._cancelled = True
        self._collectives_ended = True
        if self._end_collectives is not None:
            try:
                self._end_collectives()
            except Exception as error:  # noqa: BLE001 - a worker's own; this thread must answer on
                log_error(_logger, "ending the collectives raised", error)

    def _report(self, sign: Sign, number: int = 0) -> Report:
        health = None if self._health is None else self._health()
        busy = None if health is None else health.busy_since
        return Report(
            sign=sign,
            number=number,
            step_id=-1 if health is None else health.step_id,
            busy_since=busy,
            work=time.process_time() - self._own_time,
            text=self._told(sign, busy is not None),
        )

    def _told(self, sign: Sign, busy: bool) -> str:
        if sign is Sign.STAGE or self._health is None:
            return self._stage
        return self._text() if busy else ""

    def _send(self, report: Report) -> None:
        try:
            self._end.send(report.pack(), socket.MSG_DONTWAIT)
        except OSError:
            return  # a driver that does not read learns it later; one that is gone needs nothing


def end_own_group() -> None:
    """End this process, and all that it started if it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
