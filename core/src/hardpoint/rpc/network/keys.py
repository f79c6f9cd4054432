"""Keys of CURVE: who a peer is. Made for one run; shown by nothing."""

from __future__ import annotations

import zmq
from attrs import field, frozen

from hardpoint.errors import UnsupportedError

OLDEST = (4, 3, 5)
"""The oldest libzmq whose handshakes are sound."""


@frozen
class KeyPair:
    """A public key and its secret, as text (Z85)."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> KeyPair:
        """Make a new pair. Raises UnsupportedError where ZeroMQ has no sound encryption."""
        require_curve()
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def require_curve() -> None:
    """Raise UnsupportedError unless this ZeroMQ can encrypt and is new enough."""
    version = zmq.zmq_version_info()
    if not zmq.has("curve"):
        raise UnsupportedError(
            "a channel to other hosts",
            f"libzmq {zmq.zmq_version()}",
            reason="it was built without CURVE",
            hint="Install pyzmq from its wheel.",
        )
    if version < OLDEST:
        raise UnsupportedError(
            "a channel to other hosts",
            f"libzmq {zmq.zmq_version()}",
            reason=f"{'.'.join(map(str, OLDEST))} is the oldest that is safe",
            hint="Install a newer pyzmq.",
        )


def encrypt(socket: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
    """Have a socket that will connect prove itself by ``own``, to ``server`` alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
