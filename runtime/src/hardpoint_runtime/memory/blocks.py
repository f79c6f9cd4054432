"""Zeroing and copying KV blocks in plain torch: the built-in ``zero_blocks`` and ``copy_blocks``.

A *plane* is all blocks of one layer's keys or values: [num_blocks, ...], contiguous. Planes of one
call have one shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def zero_blocks(planes: Sequence[Tensor], blocks: Tensor) -> None:
    """Set the ``blocks`` int64 [n] (on the planes' device) of each plane to zero."""
    for plane in planes:
        plane.index_fill_(0, blocks, 0)


def copy_blocks(
    planes: Sequence[Tensor], sources: Tensor, targets: Tensor, *, overlapping: bool
) -> None:
    """Copy block ``sources[i]`` to ``targets[i]`` (int64 [n], each target once) in each plane, all
    read before any is written; ``overlapping`` says that some block is a source and a target.
    """
    for plane in planes:
        plane.index_copy_(0, targets, plane.index_select(0, sources))
