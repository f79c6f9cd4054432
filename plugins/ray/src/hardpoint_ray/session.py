"""This process's connection to Ray: joined, or started together with a Ray of its own.

There is one for the whole process, whatever this package does: Ray keeps it. So executors share it
here, and the last one that needs a Ray that was started here stops it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray
from hardpoint.config.problems import config_error
from hardpoint.errors import ExecutorFailedError
from hardpoint.records import Problem
from ray.util.client import ray as client

from hardpoint_ray import addresses
from hardpoint_ray.connection import STOP_SECONDS, Connection
from hardpoint_ray.own_ray import OwnRay
from hardpoint_ray.surroundings import ADDRESS, AUTH_MODE

if TYPE_CHECKING:
    from hardpoint_ray.settings import RaySettings

_logger = logging.getLogger("hardpoint.executor.ray")

NO_CLIENT = (
    "{}, by which no worker can be watched; run the driver on a node of that Ray, and name it as "
    "host:port"
)

SILENT_SECONDS = 2.0
"""How long the end of a Ray is awaited that does not answer."""


class Session:
    """One use of the connection, by one executor; None: of one that the program made. :meth:`close`
    is idempotent.
    """

    def __init__(self, connection: Connection | None) -> None:
        self.connection = connection
        self._closed = False

    def close(self, *, answers: bool = True) -> None:
        """Use it no more; whoever is the last ends a connection, or a Ray, that was made here.
        ``answers``: whether Ray did so, when it was asked something last.
        """
        with _LOCK:
            if self._closed:
                return
            self._closed = True
            if self.connection is not None:
                self.connection.leave(STOP_SECONDS if answers else SILENT_SECONDS)


_LOCK = threading.RLock()


def connect(settings: RaySettings, needed: Mapping[str, float]) -> Session:
    """Join Ray, or start one that has at least the resources ``needed`` (name -> amount, of all
    workers together).

    Raises ConfigError for a Ray that would have to be started without a token, ExecutorFailedError
    for one that cannot be joined or started.
    """
    with _LOCK:
        current = Connection.current
        if client.is_connected():
            raise ExecutorFailedError(NO_CLIENT.format("the program is connected by Ray's client"))
        if ray.is_initialized():
            own = current is not None and current.is_own
            addresses.require_same(settings.address, is_own=own)
            if current is not None:
                current.join(settings.start_timeout)
            return Session(current)
        return Session(_made(settings, needed))


def _made(settings: RaySettings, needed: Mapping[str, float]) -> Connection:
    """Return a connection to the Ray that is named, or to one that is started."""
    key = "plugins.ray.address" if settings.address else ADDRESS
    address = settings.address or os.environ.get(ADDRESS) or "local"
    if (stuck := Connection.stuck) is not None and stuck.goes_on:
        raise ExecutorFailedError(
            f"Ray is still at what was given up before (at {stuck.address!r}), and a process has "
            "one Ray: start another process"
        )
    made: Connection
    if address == "local":
        _require_token(settings)
        _logger.info("starting Ray on this host, as none is named")
        what = "could not be started"
        made = OwnRay(needed, settings.object_store_bytes)
    elif address.startswith("ray://"):
        raise ExecutorFailedError(NO_CLIENT.format(f"{address!r} is an address for Ray's client"))
    else:
        what = f"at {key} = {address!r} did not answer"
        made = Connection(address)
    Connection.current = made
    try:
        made.join(settings.start_timeout)
    except Exception as error:
        raise ExecutorFailedError(f"the Ray {what}: {error}") from error
    return made


def _require_token(settings: RaySettings) -> None:
    mode = os.environ.get(AUTH_MODE)
    if mode is None or mode.lower() == "token":
        return
    problem = Problem(
        key="plugins.ray.address",
        value=settings.address,
        message=f"a Ray would have to be started, and {AUTH_MODE}={mode} has it let in anyone.",
        way_out=f"Unset {AUTH_MODE}, or start Ray yourself and name its address.",
    )
    raise config_error([problem])
