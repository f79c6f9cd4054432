"""What a peer may cost at most, known or not."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Bounds:
    """Bounds of one network channel.

    ``largest`` is the bytes of one piece of a message, ``queued`` those that were sent to workers
    and not answered yet. A stranger has ``handshake`` seconds; while ``half_open`` connections are
    in theirs, no other is accepted, and those that are older than ``crowded`` seconds are ended. A
    peer that gives no sign of life for ``peer_timeout`` seconds
    is gone.
    """

    largest: int = 1 << 28
    queued: int = 1 << 29
    handshake: float = 5.0
    half_open: int = 256
    crowded: float = 1.0
    backlog: int = 64
    peer_timeout: float = 10.0
