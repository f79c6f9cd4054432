"""What both ends share: sizes, and how a message of the ring becomes a call or a reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.rpc.shared_memory.layout import LONGEST_NAME, RingLayout

CALL_RING = 1 << 20
REPLY_RING = 1 << 19
ARENA = 1 << 28
"""Bytes of the rings, and of address space (not memory) for large messages."""

_MOST_NAMES = 1000


def call_layout(data: Mapping[str, Any]) -> RingLayout:
    """Return the layout of the broadcast ring."""
    return RingLayout(readers=data["world_size"], capacity=data["call_ring"], arena=data["arena"])


def reply_layout(data: Mapping[str, Any]) -> RingLayout:
    """Return the layout of each reply ring."""
    return RingLayout(readers=1, capacity=data["reply_ring"], arena=data["arena"])


class Names:
    """Calls' names as they travel: cut to fit, whole characters. Few are used, so all are kept."""

    def __init__(self) -> None:
        self.encoded: dict[str, bytes] = {}
        """Those that arrive as they are."""
        self.decoded: dict[bytes, str] = {}

    def encode(self, name: str) -> bytes:
        """Return the bytes for a name."""
        encoded = self.encoded.get(name)
        if encoded is None:
            encoded = name.encode("utf-8", "replace")[:LONGEST_NAME]
            encoded = encoded.decode("utf-8", "ignore").encode()
            if len(self.encoded) < _MOST_NAMES and encoded.decode() == name:
                self.encoded[name] = encoded
        return encoded

    def decode(self, encoded: bytes) -> str:
        """Return the name in these bytes."""
        name = self.decoded.get(encoded)
        if name is None:
            name = encoded.decode("utf-8", "replace")
            if len(self.decoded) < _MOST_NAMES:
                self.decoded[encoded] = name
        return name
