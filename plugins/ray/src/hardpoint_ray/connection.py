"""A connection to Ray that was made here: its thread, its users and its end.

A thread makes and ends it that lives as long: Ray's processes end with the thread that started
them.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from concurrent.futures import Future, wait
from typing import ClassVar

import ray

from hardpoint_ray import addresses, signal_actions
from hardpoint_ray.settings import START_TIMEOUT
from hardpoint_ray.surroundings import environment, loopback, names_token, quiet, use_token

_logger = logging.getLogger("hardpoint.executor.ray")

FIRST_LINE = 5.0
"""Seconds after which the first line tells that Ray is awaited; each next takes twice as long."""

STOP_SECONDS = 20.0
"""How long Ray's end is awaited. It takes two, on a machine with nothing beside."""


class Connection:
    """A connection to the Ray at ``address``. What is not told otherwise is called under the lock
    of :mod:`hardpoint_ray.session`.
    """

    current: ClassVar[Connection | None] = None
    """The one of this process: Ray allows no other."""
    stuck: ClassVar[Connection | None] = None
    """One that was given up while Ray was still at it."""
    is_own: ClassVar[bool] = False
    """Whether this Ray was started here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._users = 0
        self._ready: Future[None] = Future()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hardpoint-ray", daemon=True)
        self._thread.start()

    @property
    def waited_for(self) -> str:
        """What is awaited until it is up, as people are told."""
        return f"the Ray at {self.address!r} to answer"

    @property
    def goes_on(self) -> bool:
        """Whether its thread is at work."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until it is up, and use it; raise what kept it from that, TimeoutError after so many
        seconds.
        """
        try:
            self._await(seconds)
            self._ready.result()
        except BaseException:
            self.end(STOP_SECONDS if self._ready.done() else 0.0)
            raise
        self._users += 1

    def _await(self, seconds: float) -> None:
        began, pause = time.monotonic(), FIRST_LINE
        while not wait([self._ready], min(pause, began + seconds - time.monotonic())).done:
            waited = time.monotonic() - began
            if waited >= seconds:
                raise TimeoutError(f"it did not within {START_TIMEOUT} = {seconds:g} s")
            _logger.warning("waiting for %s for %.0f s", self.waited_for, waited)
            pause *= 2

    def leave(self, seconds: float) -> None:
        """One user less; end it after the last, and wait so long for that."""
        self._users -= 1
        if self._users <= 0:
            self.end(seconds)

    def end(self, seconds: float) -> bool:
        """End it, and wait so long for that; return whether it has ended."""
        Connection.current = None
        self._leave.set()
        self._thread.join(seconds)
        if self._thread.is_alive():  # nothing ends Ray's own waiting but the process's end
            Connection.stuck = self
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            with environment(self.variables()):
                try:
                    # Ray prints its stack at SIGTERM, over whatever the program does then.
                    with quiet(), signal_actions.kept([signal.SIGTERM]):
                        self.open()
                except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                    with contextlib.suppress(Exception):
                        ray.shutdown()
                    self._ready.set_exception(error)
                    return
                self._ready.set_result(None)
                self._leave.wait()
                ray.shutdown()
        except Exception:
            _logger.exception("ending Ray raised")

    def variables(self) -> dict[str, str | None]:
        """Return what the environment is to have meanwhile; None: not that variable. On its
        thread.
        """
        return {}

    def open(self) -> None:
        """Connect. On its thread."""
        addresses.require_listener(self.address)
        local = self.address.startswith(("127.", "localhost:", "[::1]"))
        if names_token():
            use_token()
        with loopback() if local else contextlib.nullcontext():  # else it is taken for another
            ray.init(address=self.address, configure_logging=False, log_to_driver=True)
