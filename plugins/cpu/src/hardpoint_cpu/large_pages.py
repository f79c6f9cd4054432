"""Memory of large pages for weights: a step reads all of them, and looks every page up.

Linux gives such pages to who asks for them, as far as there are some in one piece, unless its
setting is ``never``; what it does not give comes in small ones. Files are not mapped so.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from hardpoint.procfs import ROOT, read
from torch import Tensor, nn

SIZE: Final = 2 << 20
"""Bytes of a large page, of most processors."""
LEAST: Final = 16 * SIZE
"""Bytes from which it is worth while."""
ALIGNMENT: Final = 64
SETTING: Final = "sys/kernel/mm/transparent_hugepage/enabled"


def can_be_had(num_bytes: int, root: Path = ROOT) -> bool:
    """Whether so many bytes should be in large pages, and the kernel has them for who asks."""
    setting = read(root / SETTING) or ""
    return num_bytes >= LEAST and ("[madvise]" in setting or "[always]" in setting)


def allocate(sizes: Sequence[int]) -> list[Tensor]:
    """Return zeros of so many bytes each, uint8, next to each other in large pages. Nothing is
    taken before it is written to.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, end + SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % SIZE
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, end)
    return [whole[first + at : first + at + size] for at, size in zip(starts, sizes, strict=True)]


def hold(model: nn.Module) -> None:
    """Give the numbers of a model on the host, which nothing was written to yet, such memory."""
    held = [each for each in model.parameters() if each.is_floating_point() and each.is_cpu]
    if not can_be_had(sum(each.nbytes for each in held)):
        return
    for each, memory in zip(held, allocate([each.nbytes for each in held]), strict=True):
        each.data = memory.view(each.dtype).view(each.shape)


def take(file: mmap.mmap) -> Tensor:
    """Return what a mapped file has, in large pages; its own are let go of one by one."""
    (memory,) = allocate([len(file)])
    source = torch.frombuffer(file, dtype=torch.uint8)
    for start in range(0, len(file), SIZE):
        stop = min(start + SIZE, len(file))
        memory[start:stop] = source[start:stop]
        file.madvise(mmap.MADV_DONTNEED, start, stop - start)
    return memory
