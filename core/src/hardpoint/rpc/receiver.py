"""Who takes replies from a channel: the thread that waits for them, or, for calls that nobody waits
for, a thread that sleeps until one comes.

A caller that waits takes the *turn*: it alone reads replies, delivers whatever arrives, and no
other thread is involved. Further callers stand by. While calls are open and nobody has the turn,
the next reply wakes the thread. So: whoever leaves the turn wakes one that stands by, arms the
channel for the thread if calls are open, and looks again; and the thread, woken while a caller has
the turn, leaves all to it. The thread may be long in a callback, and be such a caller itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hardpoint.rpc.channel import CALLER, NOBODY, THREAD, ChannelClosedError, DriverEnd

if TYPE_CHECKING:
    from hardpoint.rpc.calls import CallTable, Gather


class Receiver:
    """Delivers the replies of one channel to one call table. Belongs to one executor.

    ``failed(error)`` is called if the channel itself is found broken; without it, all calls fail.
    """

    def __init__(
        self,
        end: DriverEnd,
        table: CallTable,
        failed: Callable[[ChannelClosedError], None] | None = None,
    ) -> None:
        self._end = end
        self._failed = table.fail_all if failed is None else failed
        self._table = table
        self._open = table.calls
        self._turn = threading.Lock()
        self._standing_by: list[Callable[[], None]] = []
        self._owner = 0
        self._closed = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, gather: Gather, deadline: float | None) -> bool:
        """Wait until ``gather`` has ended or ``deadline`` (monotonic s) has passed; return whether
        it has ended. Called by any thread; delivers other calls' replies too.
        """
        me = threading.get_ident()
        if self._owner == me:  # in a callback that this thread delivers
            return self._poll(gather, deadline)
        if (self._closed or not self._turn.acquire(False)) and not self._stand_by(gather, deadline):
            return gather.ended
        self._owner = me
        try:
            ended = self._poll(gather, deadline)
        finally:
            self._owner = 0
            if self._open:
                self._leave()
            else:
                self._turn.release()
                if self._open:  # opened since, by somebody who left it to this thread
                    self.watch()
        return ended or gather.wait(deadline)

    def watch(self) -> None:
        """Have the thread take replies while nobody waits; called after a call was sent without
        waiting for it.
        """
        self._ask_thread()
        if self._turn.acquire(blocking=False):
            self._leave()

    def abandon(self) -> None:
        """Have no sender wait for room any more: the executor has failed. Any thread."""
        self._end.abandon()

    def close(self) -> None:
        """End the thread, and have callers that wait leave the channel alone; they go on to wait
        for what the call table says. Idempotent; then the driver's end can be closed.
        """
        self._closed = True
        self._end.wake(CALLER)
        self._end.wake(THREAD)
        me = threading.current_thread()
        with self._starting:
            thread = self._thread
        if thread is not None and thread is not me:
            thread.join()
        if self._owner != me.ident:
            with self._turn:
                pass

    def _poll(self, gather: Gather, deadline: float | None) -> bool:
        end, deliver, spin_s = self._end, self._table.acknowledge, self._end.spin_s
        end.arm(NOBODY)
        while True:
            came = False
            if spin_s:
                seconds = spin_s
                if deadline is not None:
                    seconds = max(0.0, min(spin_s, deadline - time.monotonic()))
                came = end.spin(seconds, len(gather.silent))
            try:
                end.collect(deliver, self._open)
            except ChannelClosedError as error:
                self._failed(error)
                return gather.ended
            if gather.ended:
                return True
            now = time.monotonic()
            if self._closed or (deadline is not None and now >= deadline):
                return False
            if came:  # the others will not be long
                continue
            if gather.wake_by(self._wake_caller):
                return True
            end.arm(CALLER)
            if not end.ready():
                end.sleep(CALLER, None if deadline is None else deadline - now)
            end.arm(NOBODY)

    def _stand_by(self, gather: Gather, deadline: float | None) -> bool:
        """Wait while others take replies; return True with the turn, or False when the call has
        ended or ``deadline`` has passed.
        """
        bell = threading.Semaphore(0)
        self._standing_by.append(bell.release)
        try:
            while not gather.wake_by(bell.release):
                if not self._closed and self._turn.acquire(False):
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                bell.acquire(timeout=left)
            return False
        finally:
            self._standing_by.remove(bell.release)
            if not self._turn.locked():  # this one was woken to take it, and does not
                self._hand_over()

    def _hand_over(self) -> None:
        """Wake one that stands by: the turn is free. A race for it has somebody win, who does this
        again.
        """
        for wake in self._standing_by[:1]:
            wake()

    def _wake_caller(self) -> None:
        self._end.wake(CALLER)

    def _leave(self) -> None:
        """Give the turn back; see that somebody looks after calls that are still open."""
        end, calls, turn = self._end, self._open, self._turn
        while True:
            awaited = bool(calls) and not self._closed
            if awaited:
                self._ask_thread()
                end.arm(THREAD)
            turn.release()
            self._hand_over()
            if not calls or self._closed:
                return
            if awaited:
                if end.ready():  # it came before the flag, and its sender woke nobody
                    end.wake(THREAD)
                return
            if not turn.acquire(blocking=False):  # whoever has it leaves it in the same way
                return

    def _ask_thread(self) -> None:
        if self._thread is None and not self._closed:
            with self._starting:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(
                        target=self._serve, name="hardpoint-replies", daemon=True
                    )
                    self._thread.start()

    def _serve(self) -> None:
        end = self._end
        while not self._closed:
            end.sleep(THREAD, None)
            if self._closed or not self._turn.acquire(blocking=False):
                continue  # a caller has the turn: it looks again when it leaves
            for reply in self._replies():
                self._table.acknowledge(*reply)

    def _replies(self) -> list[tuple[Any, ...]]:
        """Take what is here, with the turn, and leave it: delivering may take a callback's time."""
        replies: list[tuple[Any, ...]] = []
        try:
            if not self._closed:
                self._end.collect(lambda *reply: replies.append(reply))
        except ChannelClosedError as error:
            self._failed(error)
        finally:
            self._leave()
        return replies
