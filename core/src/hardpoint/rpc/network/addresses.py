"""Addresses of hosts: explicit ones only."""

from __future__ import annotations

import ipaddress
import socket

from hardpoint.errors import ConfigError
from hardpoint.records import Problem


def explicit(host: str) -> str:
    """Return the numeric address of ``host``, to listen at. Raises ConfigError for one that means
    every interface, or none.
    """
    try:
        found = socket.getaddrinfo(host or "?", None, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(str(found).partition("%")[0])
    except (OSError, ValueError, UnicodeError) as error:
        raise ConfigError(f"{host!r} is no address to listen at ({error})") from error
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"{host!r} is no address of one interface: whatever listens to other hosts is bound to "
            "an explicit one, such as 10.0.0.5"
        )
    return str(found)


def of_this_host(host: str, key: str) -> str:
    """Return the numeric address of ``host``, where something is to listen or to connect from.
    Raises ConfigError that names ``key``, by which it is configured, for one that is none of this
    host's.
    """
    address = host
    try:
        address = explicit(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _unusable(key, host, f"is no address of this host: {why}.") from error
    return address


def cannot_listen(key: str, place: str, error: OSError) -> ConfigError:
    """Return the error of a place, configured by ``key``, at which nothing can listen."""
    return _unusable(key, place, f"this host cannot listen there: {error.strerror}.")


def _unusable(key: str, value: str, message: str) -> ConfigError:
    problem = Problem(
        key=key,
        value=value,
        message=message,
        way_out="Name an address of this host, and a port that is free.",
    )
    return ConfigError(str(problem), problems=(problem,))


def url(host: str, port: int) -> str:
    """Return how ZeroMQ writes it; port 0: one that is free."""
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port or '*'}"


def split(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises ValueError."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not digits or not 0 < int(port) <= 65535:
        raise ValueError(f"{text!r} is not of the form HOST:PORT, with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def towards(host: str, port: int) -> str:
    """Return the address of this host from which packets to ``host`` leave; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))
        return str(probe.getsockname()[0])
