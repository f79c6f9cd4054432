"""Whether a replay would use what a step has: its buffers, caches and weights, and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.torch_operations import storage_of

Current = Callable[[], torch.Tensor]
"""Gives the tensor that a name stands for now."""


class Identities:
    """Where named tensors were when graphs were captured, and which modules ``model`` was made of;
    asked at each replay.
    """

    def __init__(self, tensors: Mapping[str, Current], model: nn.Module) -> None:
        self._tensors = [(name, current, place(current())) for name, current in tensors.items()]
        self._current = list(tensors.values())
        self._addresses = [current().data_ptr() for current in self._current]
        self._have_memory = all(self._addresses)
        self._model = model
        self._parts = [
            (prefix, module._modules, dict(module._modules))  # noqa: SLF001 - live, and quick
            for prefix, module in model.named_modules()
            if module._modules  # noqa: SLF001
        ]

    def check(self, model: nn.Module) -> None:
        """Raise GraphBufferError naming the first tensor that is somewhere else, or the first
        module of ``model`` that is another one.

        Called before each replay; a tenth of a microsecond for each tensor.
        """
        if model is not self._model:
            raise GraphBufferError(_other_module("the model"))
        for prefix, parts, captured in self._parts:
            if parts != captured:
                name = next(n for n in {**parts, **captured} if parts.get(n) is not captured.get(n))
                path = f"{prefix}.{name}" if prefix else name
                raise GraphBufferError(_other_module(f"module {path}"))
        if self._have_memory and self._addresses == [each().data_ptr() for each in self._current]:
            return
        for name, current, before in self._tensors:
            now = place(current())
            if now != before:
                raise GraphBufferError(
                    f"{name} is at {now:#x}, and graphs were captured with it at {before:#x}: a "
                    "replay would use the old memory. Change its values in place, or warm up again"
                )


def _other_module(what: str) -> str:
    return (
        f"{what} is another one than graphs were captured with: a replay would compute what the "
        "old one did. Change weights in place, or warm up again"
    )


def place(tensor: torch.Tensor) -> int:
    """Return a tensor's address; for one without memory of its own (a wrapper), what is unique of
    it.
    """
    return int(tensor.data_ptr() or storage_of(tensor) + tensor.storage_offset())
