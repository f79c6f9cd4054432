"""What both ends share: sizes, and how a message of the ring becomes a call or a reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.rpc.shared_memory.layout import LONGEST_NAME, RingLayout

CALL_RING = 1 << 20
REPLY_RING = 1 << 19
ARENA = 1 << 28
"""Bytes of the rings, and of address space (not memory) for large messages."""


def call_layout(data: Mapping[str, Any]) -> RingLayout:
    """Return the layout of the broadcast ring."""
    return RingLayout(readers=data["world_size"], capacity=data["call_ring"], arena=data["arena"])


def reply_layout(data: Mapping[str, Any]) -> RingLayout:
    """Return the layout of each reply ring."""
    return RingLayout(readers=1, capacity=data["reply_ring"], arena=data["arena"])


def short_name(name: str) -> bytes:
    """Return a call's name as it travels: cut to fit, whole characters."""
    encoded = name.encode("utf-8", "replace")
    if len(encoded) <= LONGEST_NAME:
        return encoded
    return encoded[:LONGEST_NAME].decode("utf-8", "ignore").encode()


def text_of(name: bytes) -> str:
    """Return a name that travelled."""
    return name.decode("utf-8", "replace")
