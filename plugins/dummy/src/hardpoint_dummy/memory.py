"""The fake device's memory: an account of who holds how much."""

from __future__ import annotations

from collections.abc import Collection

from hardpoint.errors import MemoryBudgetError
from hardpoint.records import SleepReport


class FakeMemory:
    """Bytes by tag (``weights``, ``kv_cache``); what sleeps holds none."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._sizes: dict[str, int] = {}
        self._asleep: set[str] = set()

    @property
    def used(self) -> int:
        """Bytes held."""
        return sum(size for tag, size in self._sizes.items() if tag not in self._asleep)

    @property
    def free(self) -> int:
        """Bytes not held; negative if the weights alone are too large."""
        return self.total - self.used

    def allocate(self, tag: str, num_bytes: int) -> None:
        """Take memory. The KV cache must fit; weights may exceed it, which ``free`` then shows."""
        if tag == "kv_cache" and num_bytes > self.free:
            raise MemoryBudgetError(
                f"a KV cache of {num_bytes} bytes does not fit: {self.free} of {self.total} bytes "
                f"are free (plugins.dummy.memory_bytes)"
            )
        self._sizes[tag] = num_bytes

    def release(self, tags: Collection[str], backed_up: Collection[str]) -> SleepReport:
        """Give the memory of ``tags`` back, copying those in ``backed_up`` to the host."""
        before = self.used
        kept = sum(self._sizes.get(tag, 0) for tag in backed_up if tag not in self._asleep)
        self._asleep |= set(tags)
        return SleepReport(
            bytes_freed=before - self.used, bytes_backed_up=kept, bytes_still_held=self.used
        )

    def restore(self, tags: Collection[str]) -> SleepReport:
        """Take the memory of ``tags`` again."""
        self._asleep -= set(tags)
        return SleepReport(bytes_freed=0, bytes_backed_up=0, bytes_still_held=self.used)

    def clear(self) -> None:
        """Give everything back."""
        self._sizes.clear()
