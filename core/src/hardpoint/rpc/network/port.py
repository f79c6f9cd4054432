"""A TCP port that can be closed for newcomers while those who came stay.

ZeroMQ ends the connections of a port together with it. So the port stays, and a filter on it has
the kernel drop whoever knocks: one instruction of classic BPF, "keep 0 bytes", on the listening
socket alone; connections that were made before have a socket of their own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

_ATTACH, _DETACH = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python has no names for."""
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)

HANDSHAKE_BYTES = 500
"""Who has sent fewer has not proven a key: CURVE takes 64 bytes of greeting, 200 and 257 of its own
(https://rfc.zeromq.org/spec/25/).
"""
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""Where it stands in Linux's struct tcp_info."""


class Port:
    """Listens at ``host``, ``port`` (0: any that is free). Raises OSError."""

    def __init__(self, host: str, port: int, backlog: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(backlog)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"{error.strerror} (to listen at {host}:{port})") from error
        self.number: int = self._socket.getsockname()[1]
        self.is_open = True

    def give(self) -> int:
        """Return another descriptor of it, which is the caller's."""
        return self._socket.dup().detach()

    def shut(self) -> None:
        """Let nobody else in. Where the system has no such filter, nothing."""
        if self.is_open and sys.platform == "linux":
            code = ctypes.create_string_buffer(_DROP, len(_DROP))
            program = struct.pack("HP", 1, ctypes.addressof(code))
            self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH, program)
        self.is_open = False

    def open(self) -> None:
        """Let newcomers in again."""
        if not self.is_open and sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        self.is_open = True

    def hang_up(self, fd: int) -> None:
        """End the connection that this process has as ``fd``, if it came in here and has not said
        as much as a whole handshake takes. It is not closed: that is its owner's to do.
        """
        copy = -1
        try:
            copy = os.dup(fd)
            with socket.socket(fileno=copy) as connection:
                copy = -1
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                here = tcp and connection.getsockname()[1] == self.number
                if here and _received(connection) < HANDSHAKE_BYTES:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed by now, or another thing
            return
        finally:
            if copy >= 0:
                os.close(copy)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        self._socket.close()


def _received(connection: socket.socket) -> int:
    """Return the bytes that the peer has sent; where the system does not tell, as many as it takes
    to be left alone.
    """
    if sys.platform != "linux":
        return HANDSHAKE_BYTES
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    if len(told) < _BYTES_RECEIVED.size:
        return HANDSHAKE_BYTES
    return int(_BYTES_RECEIVED.unpack_from(told)[0])
