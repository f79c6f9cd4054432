"""One pipeline stage's line to its neighbours: receive, run, send.

What a stage hands on stays its own until it is on its way, so that the stage can go on with the
next step; sends of the step before are awaited when the next one runs.

Several steps are under way, and one may fail on one stage alone. So a header with the step's number
goes before what is handed on: a stage that failed sends one that says so, and a stage drops what it
did not take of a step in which it failed itself. Then the failure is that step's, and the steps
behind it meet what is theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from hardpoint.errors import CancelledStepError, HardpointError
from hardpoint.isolation import text_of

from hardpoint_runtime.parallel.communicator import Communicator, Pending, TensorShape
from hardpoint_runtime.parallel.errors import CollectiveError

if TYPE_CHECKING:
    from hardpoint_runtime.device import DeviceOps
    from hardpoint_runtime.forward_context import ForwardContext
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.models.language_model import Carried

HEADER = TensorShape(shape=(2,), dtype=torch.int64)
"""The step's number, and how many tokens follow; below 0: so many bytes that say why none do."""
LONGEST_REASON = 2000


class StageFailedError(HardpointError):
    """An earlier pipeline stage failed in this step, so that a later one could not run it; the
    message has what that stage raised.

    What to do: read the error of the earlier stage: this one follows from it.
    """

    consequence = True


class StageLine:
    """Runs one rank's stage of a model. Built by the model runner if there are several stages, used
    on the worker's thread. All that is sent is on ``device``; the host reads it through that port.
    """

    def __init__(self, communicator: Communicator, dtype: torch.dtype, device: DeviceOps) -> None:
        self._communicator = communicator
        self._device = device
        self._dtype = dtype
        self._sending: list[Pending] = []
        self._handed_on = -1
        self._waiting: tuple[int, int] | None = None

    def run(
        self,
        model: LanguageModel,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext,
        rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the hidden states on the last stage, None on the others, which hand them on.

        Called for steps that compute tokens; a step without any sends nothing. Raises
        StageFailedError, and as :class:`Communicator` says.
        """
        self.settle()
        carried = None
        if self._communicator.index > 0:
            carried = self._receive(model, step.step_id, len(positions))
        out: torch.Tensor | Carried = model(token_ids, positions, step, rows, carried)
        if isinstance(out, Mapping):
            self._send(step.step_id, len(positions), out)
            return None
        return out

    def skip(self, step_id: int, error: BaseException) -> None:
        """Tell the next stage that nothing comes for a step that failed here, unless something was
        sent already. Raises nothing: where the line itself is down, everybody finds out.
        """
        line = self._communicator
        if line.index == line.size - 1 or self._handed_on >= step_id:
            return
        text = f"{type(error).__name__}: {text_of(error)}".encode()[:LONGEST_REASON]
        reason = self._device.to_device(list(text), torch.uint8)
        with contextlib.suppress(CollectiveError, CancelledStepError):
            self.settle()
            self._send(step_id, -len(text), {"reason": reason})

    def settle(self) -> None:
        """Wait until what was sent is on its way."""
        sending, self._sending = self._sending, []
        for each in sending:
            each.wait()

    def _send(self, step_id: int, count: int, tensors: Mapping[str, torch.Tensor]) -> None:
        line = self._communicator
        header = self._device.to_device((step_id, count), HEADER.dtype)
        self._sending.append(line.send({"header": header}, line.index + 1))
        self._sending.append(line.send(tensors, line.index + 1))
        self._handed_on = step_id

    def _receive(self, model: LanguageModel, step_id: int, num_tokens: int) -> Carried:
        """Return what the stage before hands on for a step, dropping what was for earlier ones."""
        while True:
            sent, count = self._waiting or self._header()
            self._waiting = None
            if sent > step_id:  # of a step in which that stage did not even know that it failed
                self._waiting = sent, count
                raise StageFailedError(
                    f"{self._before} sent nothing for step {step_id}, but for step {sent}"
                )
            tensors = self._tensors(model, count)
            if sent < step_id:
                continue
            if count < 0:
                reason = bytes(self._read(tensors["reason"])).decode(errors="replace")
                raise StageFailedError(f"{self._before} failed in step {step_id}: {reason}")
            if count != num_tokens:
                raise StageFailedError(
                    f"{self._before} computed {count} tokens in step {step_id}, not {num_tokens}"
                )
            return tensors

    def _header(self) -> tuple[int, int]:
        line = self._communicator
        sent, count = self._read(line.receive({"header": HEADER}, line.index - 1)["header"])
        return sent, count

    def _read(self, tensor: torch.Tensor) -> list[int]:
        values: list[int] = self._device.to_host(tensor).tolist()
        return values

    def _tensors(self, model: LanguageModel, count: int) -> dict[str, torch.Tensor]:
        due = {"reason": TensorShape(shape=(-count,), dtype=torch.uint8)}
        if count >= 0:
            shapes = model.carried_shapes(count)
            due = {name: TensorShape(shape=s, dtype=self._dtype) for name, s in shapes.items()}
        line = self._communicator
        return line.receive(due, line.index - 1)

    @property
    def _before(self) -> str:
        line = self._communicator
        return f"pipeline stage {line.index - 1} (rank {line.group.ranks[line.index - 1]})"
