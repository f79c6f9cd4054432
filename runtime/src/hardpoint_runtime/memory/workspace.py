"""Scratch memory that operations share: one growing buffer a lane, cut into views at each call.

What an operation finds in its views is undefined, and the next call of the same lane writes over
them: only one operation of a lane runs at a time. Operations that run side by side (two halves of a
batch, a second stream) take lanes of their own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from hardpoint.errors import HardpointError

if TYPE_CHECKING:
    from types import FrameType

    from hardpoint_runtime.device import DeviceOps

ALIGNMENT = 256
"""Views begin at multiples of this many bytes: what vector loads of any device are content with."""
TAG = "workspace"
"""What the memory is accounted under. It sleeps when everything does, and is there again after any
wake-up: what was kept is zero then, the rest undefined.
"""

Ask = tuple[Sequence[int], torch.dtype]
"""A view: its shape and type."""


class WorkspaceLockedError(HardpointError):
    """Scratch memory would have to grow after warm-up, when recorded graphs hold its addresses and
    the KV cache has the rest of the memory. The message names who asked, and the sizes.

    What to do: let the operation ask for its largest size in the warm-up.
    """


class Workspace:
    """The scratch memory of one rank. Built by the runner, used on its thread only.

    ``device`` gives the memory. After :meth:`lock` nothing grows.
    """

    def __init__(self, device: DeviceOps) -> None:
        self.device = device
        self.locked = False
        self._lanes: dict[Hashable, torch.Tensor] = {}
        self._kept: dict[Hashable, torch.Tensor] = {}

    def views(self, *asks: Ask, lane: Hashable = 0) -> list[torch.Tensor]:
        """Return one uninitialised tensor for each ``(shape, dtype)``: disjoint, aligned, valid
        until the next call for ``lane``. Called by operations, within a step.

        Raises WorkspaceLockedError if the lane had to grow after warm-up.
        """
        offsets, total = _layout(asks)
        buffer = self._lanes.get(lane)
        if buffer is None or buffer.numel() < total:
            held = 0 if buffer is None else buffer.numel()
            self._check_unlocked(f"lane {lane!r} would grow from {held} to {total} bytes", asks)
            buffer = None  # the old buffer may go before the new one comes
            self._lanes.pop(lane, None)
            buffer = self._lanes[lane] = self.device.allocate(total, TAG)
        return [
            _view(buffer, offset, shape, dtype)
            for offset, (shape, dtype) in zip(offsets, asks, strict=True)
        ]

    def keep(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of ``key``: zeroed the first time, then the same one, with what was
        left in it.

        Raises WorkspaceLockedError if it is not there after warm-up, ValueError if it was made with
        another shape or type.
        """
        kept = self._kept.get(key)
        if kept is None:
            num_bytes = _num_bytes((shape, dtype))
            self._check_unlocked(f"{key!r} of {num_bytes} bytes would be added", [(shape, dtype)])
            memory = self.device.allocate(num_bytes, TAG)
            kept = self._kept[key] = _view(memory, 0, shape, dtype)
        if (tuple(kept.shape), kept.dtype) != (tuple(shape), dtype):
            raise ValueError(
                f"workspace {key!r} is {tuple(kept.shape)} of {kept.dtype}, not {tuple(shape)} of "
                f"{dtype}"
            )
        return kept

    def lock(self) -> None:
        """Let nothing grow from now on. Called by the runner at the end of warm-up."""
        self.locked = True

    def unlock(self) -> None:
        """Let it grow again: a warm-up begins. What graphs hold of it may move."""
        self.locked = False

    def woke(self) -> None:
        """Be as after the first allocation: the memory was away, and may hold anything."""
        for kept in self._kept.values():
            kept.zero_()

    @property
    def num_bytes(self) -> int:
        """The bytes held."""
        kept = sum(each.numel() * each.element_size() for each in self._kept.values())
        return kept + sum(buffer.numel() for buffer in self._lanes.values())

    def clear(self) -> None:
        """Drop all memory, and be as new. Called when the runner closes."""
        self._lanes.clear()
        self._kept.clear()
        self.locked = False

    def _check_unlocked(self, what: str, asks: Sequence[Ask]) -> None:
        if self.locked:
            shapes = ", ".join(f"{tuple(shape)} of {dtype}" for shape, dtype in asks)
            raise WorkspaceLockedError(
                f"the workspace is locked since warm-up: {what} for {shapes}, asked by "
                f"{_caller()}. Ask for the largest sizes during warm-up, too"
            )


def _num_bytes(ask: Ask) -> int:
    shape, dtype = ask
    return math.prod(shape) * dtype.itemsize


def _layout(asks: Sequence[Ask]) -> tuple[list[int], int]:
    """Return the offset of each view, and the bytes of all."""
    offsets, end = [], 0
    for ask in asks:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + _num_bytes(ask)
    return offsets, end


def _view(
    buffer: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    num_bytes = _num_bytes((shape, dtype))
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype, device=buffer.device)
    part = buffer[offset : offset + num_bytes]
    return part.view(dtype).view(tuple(shape))


def _caller() -> str:
    """Return where the call into this module came from."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the interpreter's own way
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return "an unknown caller"
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
