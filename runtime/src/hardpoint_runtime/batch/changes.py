"""Which slots became free and which were taken since somebody asked, for logits processors."""

from __future__ import annotations

from hardpoint.logits_processor import AddedRequest, RequestChanges


class SlotChanges:
    """Notes requests as they come and go. One that came and went between two questions is not
    mentioned.
    """

    def __init__(self) -> None:
        self._removed: set[int] = set()
        self._added: dict[int, AddedRequest] = {}

    def add(self, request: AddedRequest) -> None:
        """Note that a request took its slot."""
        self._added[request.slot] = request

    def remove(self, slot: int) -> None:
        """Note that a slot became free."""
        if self._added.pop(slot, None) is None:
            self._removed.add(slot)

    def take(self) -> RequestChanges | None:
        """Return, once, what happened; None for nothing."""
        if not self._removed and not self._added:
            return None
        changes = RequestChanges(
            removed=tuple(sorted(self._removed)), added=tuple(self._added.values())
        )
        self._removed, self._added = set(), {}
        return changes
