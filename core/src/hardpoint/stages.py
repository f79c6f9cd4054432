"""How an executor carries what pipeline stages hand on, if it does so itself."""

from __future__ import annotations

from typing import Protocol


class StageCarrier(Protocol):
    """One worker's neighbours in the pipeline: the ranks of the same place in the stages before and
    after its own. Used on the worker's thread, while a step runs.
    """

    def hand_on(self, data: bytes) -> None:
        """Have the next stage get ``data`` with this step, after what was handed on before."""

    def handed_on(self) -> memoryview | None:
        """Return the next of what the stage before handed on with this step; None: no more."""
