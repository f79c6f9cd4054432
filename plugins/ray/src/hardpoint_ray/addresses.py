"""The address of a Ray that is to be joined: whether anybody is there, and which Ray it is."""

from __future__ import annotations

import ipaddress
import socket

import ray
from hardpoint.config.problems import config_error
from hardpoint.records import Problem

LOOK_SECONDS = 10.0
"""For how long somebody is awaited who takes a connection at an address."""


def require_same(wanted: str | None, *, is_own: bool) -> None:
    """Raise ConfigError if the address that is ``wanted`` is not that of the Ray that this process
    is connected to.
    """
    found = ray.get_runtime_context().gcs_address
    if wanted is None or wanted == "auto" or (wanted == "local" and is_own):
        return
    if wanted != "local" and _same(wanted, found):
        return
    problem = Problem(
        key="plugins.ray.address",
        value=wanted,
        message=f"this process is connected to the Ray at {found}, and a process has one.",
        way_out="Unset it to use that one, or start another process.",
    )
    raise config_error([problem])


def _same(one: str, other: str) -> bool:
    """Whether two addresses are one: their ports are, and their hosts are or one is loopback's."""
    hosts, ports = [], set()
    for address in (one, other):
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), None)
        except OSError:
            return one == other
        hosts.append({str(each[4][0]) for each in found})
        ports.add(port)
    if len(ports) > 1:
        return False
    return bool(hosts[0] & hosts[1]) or any(
        ipaddress.ip_address(each).is_loopback for each in hosts[0] | hosts[1]
    )


def require_listener(address: str) -> None:
    """Raise OSError if nobody listens at ``address``, where it names a port: Ray would try again
    for a quarter of an hour.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), LOOK_SECONDS).close()
