"""Whether memory is still what a graph was captured with: its buffers, caches and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.torch_operations import storage_of

Current = Callable[[], torch.Tensor]
"""Gives the tensor that a name stands for now."""


class Identities:
    """Where named tensors were when graphs were captured; asked at each replay."""

    def __init__(self, tensors: Mapping[str, Current]) -> None:
        self._tensors = [(name, current, place(current())) for name, current in tensors.items()]

    def check(self) -> None:
        """Raise GraphBufferError naming the first tensor that is somewhere else.

        Called before each replay; a fraction of a microsecond for each tensor.
        """
        for name, current, before in self._tensors:
            now = place(current())
            if now != before:
                raise GraphBufferError(
                    f"{name} is at {now:#x}, and graphs were captured with it at {before:#x}: a "
                    "replay would use the old memory. Change its values in place, or warm up again"
                )


def place(tensor: torch.Tensor) -> int:
    """Return a tensor's address; for one without memory of its own (a wrapper), what is unique of
    it.
    """
    return int(tensor.data_ptr() or storage_of(tensor) + tensor.storage_offset())
