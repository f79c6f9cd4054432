"""The line between pipeline stages where the executor carries what they hand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from hardpoint.errors import UnsupportedError

from hardpoint_runtime.parallel.communicator import (
    Communicator,
    Meeting,
    Pending,
    Sent,
    Tensor,
    TensorShape,
)
from hardpoint_runtime.parallel.errors import CollectiveMismatchError
from hardpoint_runtime.parallel.groups import Group

if TYPE_CHECKING:
    from hardpoint.stages import StageCarrier

    from hardpoint_runtime.device import DeviceOps


class NothingHandedOnError(CollectiveMismatchError):
    """The stage before handed on less in a step than this one expected.

    What to do: look for that stage's own error, from which this one follows.
    """

    consequence = True


class CarriedLine(Communicator):
    """Hands tensors to the next stage, and takes those of the stage before, as bytes: the executor
    brings them with the step itself. Nothing else is communicated along a pipeline.
    """

    def __init__(
        self, group: Group, meeting: Meeting, carrier: StageCarrier, device: DeviceOps
    ) -> None:
        super().__init__(group, meeting)
        self._carrier = carrier
        self._device = device

    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """Hand copies on, in their order."""
        for tensor in tensors.values():
            host = self._device.to_host(tensor).contiguous()
            self._carrier.hand_on(host.view(-1).view(torch.uint8).numpy().tobytes())
        return Sent()

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """Take the next tensors of the stage before."""
        return {name: self._taken(name, shape, source) for name, shape in shapes.items()}

    def _taken(self, name: str, due: TensorShape, source: int) -> Tensor:
        data = self._carrier.handed_on()
        ranks = (self.group.ranks[source],)
        if data is None:
            raise NothingHandedOnError(
                f"rank {ranks[0]} handed on no {name!r}", group=str(self.group),
                operation="receive", ranks=ranks,
            )  # fmt: skip
        host = due.empty()
        if data.nbytes != host.nbytes:
            self.mismatch(
                "receive", source, f"handed on {data.nbytes} bytes of {name!r}, not {host.nbytes}"
            )
        if host.nbytes:
            host.view(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
            )
        return self._device.to_device(host, due.dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Raise: stages have nothing to sum."""
        self._unsupported("all_reduce")

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Raise: stages have nothing to gather."""
        self._unsupported("all_gather")

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Raise: what all stages know, the driver sends."""
        self._unsupported("broadcast")

    def barrier(self) -> None:
        """Raise: stages do not wait for each other."""
        self._unsupported("barrier")

    def close(self) -> None:
        """Nothing is held."""

    def _unsupported(self, operation: str) -> NoReturn:
        reason = "its executor carries what stages hand on"
        raise UnsupportedError(operation, f"group {self.group}", reason=reason)
