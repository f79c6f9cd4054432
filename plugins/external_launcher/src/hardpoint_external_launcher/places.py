"""Where the ranks of a launcher meet, and by which store: on one host, on several, or at one that
the launcher itself serves.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hardpoint.config.problems import config_error
from hardpoint.errors import ConfigError
from hardpoint.records import Problem

from hardpoint_external_launcher.host_store import ForeignError, HostStore, HostStoreClient
from hardpoint_external_launcher.launcher_store import torch_store
from hardpoint_external_launcher.launchers import (
    ADDRESS,
    PORT,
    Seat,
    every_interface,
    of_one_interface,
)
from hardpoint_external_launcher.named_store import MeetingStore, NamedStore
from hardpoint_external_launcher.settings import KEY_FILE

if TYPE_CHECKING:
    from hardpoint.rpc.network.key_file import JoinKeys
    from hardpoint.rpc.network.store import Asking

    from hardpoint_external_launcher.keyed_store import KeyedStore


class Place(ABC):
    """A way to the store where all ranks of ``seat``'s launcher meet."""

    serves = False
    """Whether this rank serves it."""
    absent = ""
    """Why else a rank may not have come."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._way: Asking | None = None
        self._served: HostStore | KeyedStore | None = None

    def __str__(self) -> str:
        return f"{self.seat.address}:{self.seat.port}"

    @abstractmethod
    def serve(self) -> None:
        """Serve the store, if this rank is to. Raises ConfigError, or OSError if the place is
        taken.
        """

    @abstractmethod
    def reach(self, patience: float) -> MeetingStore:
        """Return the store; what is asked of it raises StoreLostError or RuntimeError when it
        cannot be reached. Raises these, too.
        """

    def leave(self) -> None:
        """Ask the store no more. Idempotent."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def close(self) -> None:
        """Leave, and serve no more. Idempotent."""
        self.leave()
        served, self._served = self._served, None
        if served is not None:
            served.close()


class HostPlace(Place):
    """For ranks of one host."""

    absent = f", or on another host: ranks of several hosts need {KEY_FILE}"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.serves = seat.rank == 0
        self._checked = False
        told = f"{os.geteuid()}/{seat.address}:{seat.port}/{seat.run}"
        self._name = f"hardpoint-{hashlib.sha256(told.encode()).hexdigest()[:32]}"

    def serve(self) -> None:
        """Serve the store where no network leads. Raises OSError if another process does."""
        self._require_own_address()
        if self.serves and self._served is None:
            self._served = HostStore(self._name)

    def reach(self, patience: float) -> MeetingStore:
        """Return the store of rank 0. Raises ConfigError if another user's process serves one."""
        try:
            self._way = HostStoreClient(self._name)
        except ForeignError as error:
            pid, user = error.args
            problem = Problem(
                key=PORT,
                value=self.seat.port,
                message=f"process {pid} of user {user} listens where the ranks of this user meet.",
                way_out="Use another port, the same in every process.",
            )
            raise config_error([problem]) from None
        return NamedStore(self._way)

    def _require_own_address(self) -> None:
        """Raise ConfigError if the ranks are to meet on another host, which needs keys."""
        if self._checked or self.seat.local_size == self.seat.world_size:
            return
        self._checked = True
        try:
            listener(self.seat, port=0).close()
        except OSError as error:
            if self.serves:
                raise unusable(self.seat, error) from error
            problem = Problem(
                key=KEY_FILE,
                value=None,
                message=f"{ADDRESS} = {self.seat.address} is no address of this host "
                f"({error.strerror}), and what ranks of several hosts say is encrypted by keys.",
                way_out=f"Set {KEY_FILE} to a file that all ranks can read; rank 0 makes it if it "
                "is not there.",
            )
            raise config_error([problem]) from error


class KeyedPlace(Place):
    """For ranks of several hosts: rank 0 serves the store at MASTER_ADDR and MASTER_PORT."""

    absent = f", or with another {KEY_FILE}"

    def __init__(self, seat: Seat, keys: JoinKeys, peer_timeout: float) -> None:
        super().__init__(seat)
        self.serves = seat.rank == 0
        self._keys = keys
        self._peer_timeout = peer_timeout

    def serve(self) -> None:
        """Serve the store behind the keys. Raises ConfigError, and OSError if the port is taken."""
        if not self.serves or self._served is not None:
            return
        from hardpoint_external_launcher.keyed_store import KeyedStore

        try:
            listener(self.seat).close()
            address = resolved(self.seat)
            self._served = KeyedStore(self._keys, address, self.seat.port or 0, self._peer_timeout)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            raise unusable(self.seat, error) from error

    def reach(self, patience: float) -> MeetingStore:
        """Return the store of rank 0, reached by the keys."""
        from hardpoint_external_launcher.keyed_store import client

        try:
            address = resolved(self.seat)
        except OSError as error:
            raise unusable(self.seat, error) from error
        self._way = client(self._keys, address, self.seat.port or 0, self._peer_timeout)
        return NamedStore(self._way)


class LauncherPlace(Place):
    """For ranks of several hosts whose launcher serves a store itself."""

    absent = f", or with another {KEY_FILE}"

    def serve(self) -> None:
        """Nothing: the launcher does."""

    def reach(self, patience: float) -> MeetingStore:
        """Return the launcher's store."""
        found: MeetingStore = torch_store(self.seat.address or "", self.seat.port or 0, patience)
        return found


def place_of(seat: Seat, keys: JoinKeys | None, peer_timeout: float) -> Place:
    """Return where the ranks of ``seat``'s launcher meet, with the keys of their key file."""
    if keys is None:
        return HostPlace(seat)
    return LauncherPlace(seat) if seat.hosts_store else KeyedPlace(seat, keys, peer_timeout)


def resolved(seat: Seat) -> str:
    """Return the number of MASTER_ADDR. Raises OSError."""
    found = socket.getaddrinfo(seat.address, seat.port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def listener(seat: Seat, port: int | None = None) -> socket.socket:
    """Return a socket bound to MASTER_ADDR, and ``port`` (None: MASTER_PORT). Raises OSError, and
    ConfigError for what means every interface.
    """
    address = resolved(seat)
    if not of_one_interface(address):
        raise config_error([every_interface(f"{seat.address} = {address}")])
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, (seat.port or 0) if port is None else port))
    except OSError:
        made.close()
        raise
    return made


def unusable(seat: Seat, error: OSError) -> ConfigError:
    """Return the error of a place at which rank 0 cannot listen."""
    taken = error.errno == errno.EADDRINUSE
    key, value = (PORT, str(seat.port)) if taken else (ADDRESS, str(seat.address))
    problem = Problem(
        key=key,
        value=value,
        message=f"rank 0 cannot listen there: {error.strerror}.",
        way_out="Name an address of this host, and a port that is free.",
    )
    return ConfigError(str(problem), problems=(problem,))
