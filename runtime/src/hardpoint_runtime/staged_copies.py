"""Copies between the host and a device through page-locked memory, each in its place in the order
of work.

What the host gives goes on the current stream, so that all later work finds it, and the host goes
on at once. What the host asks for goes on a stream of its own, which waits for the work that makes
it: later work does not delay it, and it does not delay later work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hardpoint_runtime.device import TorchDeviceOps


class Fetch:
    """Values on their way to the host; ``wait`` gives them. Used by the thread that asked for
    them.
    """

    def __init__(self, values: torch.Tensor, event: Any = None, source: object = None) -> None:
        self._values = values
        self._event = event
        # Given back before the copy is done, the memory could be written by somebody else.
        self._source = source

    def wait(self) -> torch.Tensor:
        """Return the values on the host, once they are there. May be asked again."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        return self._values


class StagedCopies:
    """The copies of one device whose host memory can be page-locked (``pins``). Built by
    :class:`~hardpoint_runtime.device.TorchDeviceOps` at its first copy.
    """

    def __init__(self, device: TorchDeviceOps) -> None:
        self.device = device
        self.stream = device.stream()

    def to_device(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a new device tensor with the values of ``host``, which may change afterwards."""
        staged = self._staged(host, dtype)
        return staged.to(device=self.device.device, non_blocking=True)

    def write(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy the values of ``host``, which may change afterwards, into a device tensor."""
        target.copy_(self._staged(host, target.dtype), non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> Fetch:
        """Begin to bring the values of a device tensor to the host."""
        values = self.device.host_buffer(tensor.shape, tensor.dtype)
        event = self.device.event()
        self.stream.wait_stream(self.device.current_stream())
        with self.stream:
            values.copy_(tensor, non_blocking=True)
            event.record()
        return Fetch(values, event, tensor)

    def _staged(self, host: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in page-locked memory. It is new for each copy: torch gives it to
        nobody else before the copy is done.
        """
        staged = self.device.host_buffer(host.shape, dtype)
        staged.copy_(host)
        return staged
