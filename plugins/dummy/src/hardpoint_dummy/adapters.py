"""Adapters on the fake device: which are loaded, which are pinned."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from hardpoint.errors import ConfigError, InvalidRequestError, LifecycleError


class _Request(Protocol):
    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=_Request)


class AdapterSlots(Generic[R]):
    """At most ``capacity`` adapters; when full, the least recently used that is not pinned goes."""

    def __init__(self, capacity: int, noun: str, key: str) -> None:
        self._capacity = capacity
        self._noun = noun
        self._key = key
        self._loaded: dict[int, R] = {}
        self._pinned: set[int] = set()

    def add(self, request: R) -> bool:
        """Load ``request``, replacing one of the same id.

        Raises ConfigError if the configuration allows none, LifecycleError if all are pinned.
        """
        if self._capacity == 0:
            raise ConfigError(f"{self._key} = 0: no {self._noun} can be loaded; raise it")
        if request.id not in self._loaded and len(self._loaded) >= self._capacity:
            victim = next((each for each in self._loaded if each not in self._pinned), None)
            if victim is None:
                raise LifecycleError(
                    f"no room for {self._noun} {request.id}: {sorted(self._pinned)} are pinned"
                )
            del self._loaded[victim]
        self._loaded.pop(request.id, None)
        self._loaded[request.id] = request
        return True

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is unknown."""
        self._pinned.discard(adapter_id)
        return self._loaded.pop(adapter_id, None) is not None

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter; raise InvalidRequestError if it is unknown."""
        self.use(adapter_id)
        self._pinned.add(adapter_id)
        return True

    def use(self, adapter_id: int) -> R:
        """Return a loaded adapter and note its use; raise InvalidRequestError if it is unknown."""
        request = self._loaded.pop(adapter_id, None)
        if request is None:
            raise InvalidRequestError(
                f"{self._noun} {adapter_id} is not loaded; loaded: {sorted(self._loaded)}",
                field="id",
                value=adapter_id,
            )
        self._loaded[adapter_id] = request
        return request

    def ids(self) -> frozenset[int]:
        """Return the ids loaded."""
        return frozenset(self._loaded)
