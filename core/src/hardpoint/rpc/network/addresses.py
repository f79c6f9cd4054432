"""Addresses of hosts: explicit ones only."""

from __future__ import annotations

import ipaddress
import socket

from hardpoint.errors import ConfigError


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


def url(host: str, port: int) -> str:
    """Return how ZeroMQ writes it; port 0: one that is free."""
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port or '*'}"


def split(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises ValueError."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not of the form HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def towards(host: str, port: int) -> str:
    """Return the address of this host from which packets to ``host`` leave; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))
        return str(probe.getsockname()[0])
