"""How the engine's thread wakes the tasks of an event loop: once a step, however many wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from hardpoint_engine.completion import Generation
from hardpoint_engine.engine_thread import Call


class LoopBell:
    """Wakes calls on ``loop``. ``ring`` is for any thread; many rings become one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung: deque[AsyncCall] = deque()

    def ring(self, call: AsyncCall) -> None:
        """Have ``call`` look again. A loop that is closed wakes nobody."""
        self._rung.append(call)
        if len(self._rung) == 1:  # only the engine's thread rings
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._rung.clear()

    def _wake(self) -> None:
        while self._rung:
            self._rung.popleft().heard.set()


class AsyncCall(Call):
    """What one task waits for: the news of its only request, or, not ``stepwise``, the end of all.
    They are computed whether or not it waits.

    ``heard`` is set on the loop alone.
    """

    def __init__(
        self, generations: Sequence[Generation], *, bell: LoopBell, stepwise: bool = True
    ) -> None:
        super().__init__(generations, stepwise=stepwise, eager=True)
        self.heard = asyncio.Event()
        self._loop_bell = bell
        self._error: Exception | None = None

    def ring(self, error: Exception | None = None) -> None:
        """Wake the task, to look again or to raise ``error``."""
        self._error = self._error or error
        self._loop_bell.ring(self)

    async def sleep_async(self) -> None:
        """Wait for the bell. Raises the error that it was rung for."""
        await self.heard.wait()
        self.heard.clear()
        if self._error is not None:
            raise self._error
