"""Delivery by chance: late, lost, doubled, out of order, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from hardpoint.simulation.clock import Simulation

CALLS, CONTROL = "calls", "control"
"""The two lanes between a driver and a worker."""


@frozen(kw_only=True)
class Weather:
    """How a lane delivers: after which delays (seconds), what share it loses or doubles, and
    whether messages overtake each other.
    """

    delay: tuple[float, float] = (20e-6, 200e-6)
    loss: float = 0.0
    doubling: float = 0.0
    in_order: bool = True


FAIR = Weather()
"""What shared memory and local sockets give: nothing lost, nothing doubled, in order."""


class Network:
    """Carries messages between addresses; several may listen at one, as after a restart."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._listeners: dict[str, list[Callable[[Any], None]]] = {}
        self._last: dict[tuple[str, str, str], float] = {}
        self.weather: dict[str, Weather] = {CALLS: FAIR, CONTROL: FAIR}
        self.cut: set[str] = set()
        """Addresses that nothing reaches and that reach nobody."""
        self.lost = 0
        self.doubled = 0

    def listen(self, address: str, hear: Callable[[Any], None]) -> Callable[[], None]:
        """Have ``hear(message)`` called for what comes to ``address``; return what ends that."""
        listeners = self._listeners.setdefault(address, [])
        listeners.append(hear)
        return lambda: listeners.remove(hear)

    def send(self, lane: str, source: str, target: str, message: Any, what: str) -> None:
        """Send ``message`` on its way; ``what`` tells it in the trace."""
        weather, random = self.weather[lane], self._simulation.random
        copies = 1
        if random.random() < weather.loss:
            copies = 0
            self.lost += 1
            self._simulation.note(f"lost: {what}")
        elif random.random() < weather.doubling:
            copies = 2
            self.doubled += 1
        for _ in range(copies):
            when = self._simulation.now + random.uniform(*weather.delay)
            if weather.in_order:
                key = (lane, source, target)
                when = self._last[key] = max(when, self._last.get(key, 0.0))
            self._simulation.after(
                when - self._simulation.now, "", lambda: self._arrive(source, target, message, what)
            )

    def _arrive(self, source: str, target: str, message: Any, what: str) -> None:
        if source in self.cut or target in self.cut:
            self.lost += 1
            self._simulation.note(f"cut off: {what}")
            return
        if what:
            self._simulation.note(what)
        for hear in list(self._listeners.get(target, ())):
            hear(message)
