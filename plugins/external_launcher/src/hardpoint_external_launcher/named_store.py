"""Hardpoint's own store by the names that torch's has: who meets need not know which it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hardpoint.rpc.network.store import Asking


class MeetingStore(Protocol):
    """What ranks need of a store, torch's or another. A value that is not there is no error."""

    def set(self, key: str, value: str) -> None:
        """Put a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Put ``desired`` where ``expected`` is (empty: nothing); return what is there then."""


class NamedStore:
    """What :class:`hardpoint.rpc.network.store.Asking` asks, as a :class:`MeetingStore`."""

    def __init__(self, way: Asking) -> None:
        self._way = way

    def set(self, key: str, value: str) -> None:
        """Put a value."""
        self._way.set(key.encode(), value.encode())

    def get(self, key: str) -> bytes:
        """Return a value, empty if it is not there."""
        return self._way.get(key.encode()) or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return self._way.add(key.encode(), amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(self._way.get(key.encode()) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Put ``desired`` where ``expected`` is (empty: nothing); return what is there then."""
        return self._way.replace(key.encode(), expected.encode(), desired.encode())
