"""What an executor holds outside of itself, in one object that does not hold the executor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from hardpoint.errors import ExecutorFailedError, HardpointError
from hardpoint.rpc import channel
from hardpoint.rpc.calls import Call, CallTable
from hardpoint.rpc.channel import DriverEnd
from hardpoint.rpc.claims import CallerClaims
from hardpoint.rpc.encoding import Codec
from hardpoint.rpc.faults import fault
from hardpoint.rpc.receiver import Receiver

from hardpoint_multiproc.group import WorkerGroup
from hardpoint_multiproc.launching import Launch, WorkerPlan, make_launches
from hardpoint_multiproc.loop import LONGEST_WAIT
from hardpoint_multiproc.nursery_process import NurseryProcess

_T = TypeVar("_T")

RELEASE_SECONDS = 1.0
"""How long an abandoned executor's workers may take to end, at collection or interpreter exit."""

LEAST_SECONDS = 0.2
"""How long giving back may take even when the deadline has passed."""


class Resources:
    """Nursery, workers and channel of one executor. :meth:`release` is its finalizer."""

    def __init__(self, calls: CallTable, generation: int, nursery: NurseryProcess) -> None:
        self._pid = os.getpid()
        self.calls = calls
        self.generation = generation
        self.nursery = nursery
        self.launches: list[Launch] = []
        self.group: WorkerGroup | None = None
        self._end: DriverEnd | None = None
        self._claims: CallerClaims | None = None
        self._receiver: Receiver | None = None

    def make(self, kind: str, spin_us: float, codec: Codec, plans: Sequence[WorkerPlan]) -> None:
        """Make the channel, what calls are taken back by, and what each worker is given."""
        self._end = end = channel.create(kind, len(plans), spin_us=spin_us, codec=codec)
        self._receiver = Receiver(end, self.calls)
        self._claims = claims = CallerClaims(len(plans))
        claims.wait = self._receiver.wait
        make_launches(plans, self.launches, end, claims, self.nursery.output)

    @property
    def end(self) -> DriverEnd:
        """The driver's end of the channel."""
        return _there(self._end)

    @property
    def receiver(self) -> Receiver:
        """Who takes replies from it."""
        return _there(self._receiver)

    @property
    def claims(self) -> CallerClaims:
        """The driver's side of claims."""
        return _there(self._claims)

    @property
    def workers(self) -> WorkerGroup:
        """The workers."""
        return _there(self.group)

    def close(self, deadline: float) -> None:
        """End the workers by ``deadline`` (monotonic s), then give everything back. Idempotent; in
        a forked child of the driver, nothing: all of it is the driver's.
        """
        if os.getpid() != self._pid:
            return
        deadline = min(deadline, time.monotonic() + LONGEST_WAIT)
        if self.group is not None:
            self.group.stop(deadline, lambda: self._ask(deadline))
        if self._receiver is not None:
            self._receiver.close()
        left = max(LEAST_SECONDS, deadline - time.monotonic())
        if self.group is not None:
            self.group.close(left)
        self.nursery.close(left)
        for launch in self.launches:
            launch.close()
        if self._end is not None:
            self._end.close()
        if self._claims is not None:
            self._claims.close()

    def release(self) -> None:
        """Close for an executor that was collected, or that the interpreter's end found running."""
        self.close(time.monotonic() + RELEASE_SECONDS)
        self.calls.fail_all(ExecutorFailedError("the executor was dropped without shutdown()"))

    def _ask(self, deadline: float) -> None:
        """Send the workers their last call."""
        fault("shutdown.driver")
        call = Call(
            call_id=self.calls.next_id(),
            generation=self.generation,
            method="shutdown",
            deadline=deadline,
        )
        try:
            self.end.send(call)
        except HardpointError:
            return  # they are full of calls, or gone; signals follow


def _there(part: _T | None) -> _T:
    if part is None:
        raise ExecutorFailedError("the workers were not started")
    return part


def uninterrupted(function: Callable[[], None]) -> None:
    """Run ``function`` to its end on a thread of its own, as signal handlers run on the main thread
    alone: an interrupt between making a thing and keeping it would lose the thing. Raises what it
    raised, or the interrupt that came meanwhile.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    thread = threading.Thread(target=run, name="hardpoint-mp-making")
    try:
        thread.start()
        thread.join()
    except BaseException:
        if thread.ident is not None:
            thread.join()
        raise
    outcome.result()
