"""What the conformance kit cannot see through the contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_conformance import Probe

if TYPE_CHECKING:
    from hardpoint.worker import Worker


class AcmeProbe(Probe):
    """Looks at the unit's memory."""

    @staticmethod
    def held_bytes(worker: Worker) -> int | None:
        """Return the bytes that this process holds on its unit."""
        from hardpoint_acme import torch_backend

        held: int = torch_backend.memory_allocated()
        return held
