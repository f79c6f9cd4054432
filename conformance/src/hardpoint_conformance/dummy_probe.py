"""The probe of the ``dummy`` platform, whose model is a rule and not a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hardpoint_conformance.oracle import Oracle
from hardpoint_conformance.probe import Probe

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.worker import Worker


class DummyOracle(Oracle):
    """The rule of :mod:`hardpoint_dummy.model`, without its cache, blocks or requests."""

    name = "the dummy platform's own rule (hardpoint_dummy.model)"

    def __init__(self, source: str, vocab_size: int) -> None:
        from hardpoint_dummy.model import FakeModel, seed_of

        self._model = FakeModel(seed_of("weights", source), vocab_size)
        self.salt = 0

    def adapted(self, adapter: LoRARequest) -> DummyOracle:
        """Return the rule with the adapter's own number in each cell."""
        from hardpoint_dummy.model import seed_of

        other = copy(self)
        other.salt = seed_of("lora", adapter.id, adapter.digest)
        return other

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return the rule's logits after each token."""
        from hardpoint_dummy.model import joined

        cells: list[int] = []
        rows = []
        for token in tokens:
            cells.append(self._model.cell(cells[-1] if cells else None, token, self.salt))
            rows.append(self._model.logits(self._model.state([joined(cells)])))
        return np.asarray(rows)


class DummyProbe(Probe):
    """Looks inside the fake device."""

    logit_tolerance: ClassVar[float | None] = 1e-6
    loads_shards: ClassVar[bool] = False
    platform: ClassVar[str] = "hardpoint_dummy.platform:DummyPlatform"
    """The class that is asked for its devices."""

    def oracle(self, description: ModelDescription) -> Oracle:
        """Return the rule."""
        return DummyOracle(str(description.path), description.vocab_size)

    def tracing(self, folder: str) -> Mapping[str, object]:
        """Return its own key."""
        return {"plugins.dummy.trace_folder": folder}

    def visible_devices(self, mask: str) -> tuple[str, ...]:
        """Return what a platform on a machine of eight would use."""
        from hardpoint.references import resolve
        from hardpoint_dummy.settings import DummySettings

        platform = resolve(self.platform)(DummySettings(num_devices=8))
        return tuple(device.id for device in platform.visible_devices(mask))

    @staticmethod
    def held_bytes(worker: Worker) -> int | None:
        """Return what the fake memory accounts for."""
        used: int = worker.memory.used  # type: ignore[attr-defined]
        return used
