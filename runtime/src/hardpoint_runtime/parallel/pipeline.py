"""One pipeline stage's line to its neighbours: receive, run, send.

What a stage hands on stays its own until it is on its way, so that the stage can go on with the
next step; sends of the step before are awaited when the next one runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hardpoint_runtime.parallel.communicator import Communicator, Pending, TensorShape

if TYPE_CHECKING:
    from hardpoint_runtime.forward_context import ForwardContext
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.models.language_model import Carried


class StageLine:
    """Runs one rank's stage of a model. Built by the model runner if there are several stages, used
    on the worker's thread.
    """

    def __init__(self, communicator: Communicator, dtype: torch.dtype) -> None:
        self._communicator = communicator
        self._dtype = dtype
        self._sending: Pending | None = None

    def run(
        self,
        model: LanguageModel,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext,
        rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the hidden states on the last stage, None on the others, which hand them on.

        Called for steps that compute tokens; a step without any sends nothing. Raises as
        :class:`Communicator` says.
        """
        self.settle()
        line, carried = self._communicator, None
        if line.index > 0:
            shapes = model.carried_shapes(len(positions))
            due = {name: TensorShape(shape=s, dtype=self._dtype) for name, s in shapes.items()}
            carried = line.receive(due, line.index - 1)
        out: torch.Tensor | Carried = model(token_ids, positions, step, rows, carried)
        if isinstance(out, Mapping):
            self._sending = line.send(out, line.index + 1)
            return None
        return out

    def settle(self) -> None:
        """Wait until what was sent is on its way."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.wait()
