"""Zeroing and copying KV blocks: all layers in one launch, through a table of their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import EXACT

WORDS = 1024
"""Numbers of a block that a program moves at once."""


@triton.jit
def zero_blocks_kernel(planes, blocks, block_words, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Zero a part of one block in one plane, ``block_words`` integers of WORD bits a block."""
    start = tl.load(blocks + tl.program_id(0)) * block_words
    plane = tl.load(planes + tl.program_id(1))
    place = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    if WORD == 32:
        memory = plane.to(tl.pointer_type(tl.int32))
        tl.store(memory + start + place, tl.zeros([WORDS], tl.int32), mask=place < block_words)
    else:
        memory = plane.to(tl.pointer_type(tl.int8))
        tl.store(memory + start + place, tl.zeros([WORDS], tl.int8), mask=place < block_words)


@triton.jit
def copy_blocks_kernel(
    sources,
    targets,
    source_blocks,
    target_blocks,
    block_words,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy a part of one block from a plane of ``sources`` to the same plane of ``targets``."""
    source = tl.load(source_blocks + tl.program_id(0)) * block_words
    target = tl.load(target_blocks + tl.program_id(0)) * block_words
    plane = tl.program_id(1)
    place = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = place < block_words
    if WORD == 32:
        kind: tl.constexpr = tl.pointer_type(tl.int32)
    else:
        kind: tl.constexpr = tl.pointer_type(tl.int8)
    words = tl.load(tl.load(sources + plane).to(kind) + source + place, mask=inside)
    tl.store(tl.load(targets + plane).to(kind) + target + place, words, mask=inside)


def zero_blocks(planes: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
    """Set the ``blocks`` int64 [n] to zero in each of the planes [num_blocks, ...], which are
    contiguous and of one shape and dtype, on the device.
    """
    word, block_words = _words(planes[0])
    zero_blocks_kernel[(len(blocks), len(planes), triton.cdiv(block_words, WORDS))](
        _addresses(planes), blocks, block_words, WORD=word, WORDS=WORDS, **EXACT
    )


def copy_blocks(
    planes: Sequence[torch.Tensor],
    sources: torch.Tensor,
    targets: torch.Tensor,
    *,
    overlapping: bool,
) -> None:
    """Copy block ``sources[i]`` to ``targets[i]`` (int64 [n], each target once) in each plane, as
    for :func:`zero_blocks`. ``overlapping``: some block is a source and a target; then all are read
    before any is written.
    """
    word, block_words = _words(planes[0])
    grid = (len(sources), len(planes), triton.cdiv(block_words, WORDS))
    addresses = _addresses(planes)
    if overlapping:
        waiting = [plane.new_empty(len(sources), *plane.shape[1:]) for plane in planes]
        between, places = _addresses(waiting), torch.arange(len(sources), device=sources.device)
        copy_blocks_kernel[grid](
            addresses, between, sources, places, block_words, WORD=word, WORDS=WORDS, **EXACT
        )
        copy_blocks_kernel[grid](
            between, addresses, places, targets, block_words, WORD=word, WORDS=WORDS, **EXACT
        )
    else:
        copy_blocks_kernel[grid](
            addresses, addresses, sources, targets, block_words, WORD=word, WORDS=WORDS, **EXACT
        )


def _words(plane: torch.Tensor) -> tuple[int, int]:
    """Return the bits of the integers that a block is moved as, and how many a block has."""
    num_bytes = plane[0].numel() * plane.element_size()
    return (8, num_bytes) if num_bytes % 4 else (32, num_bytes // 4)


def _addresses(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    pointers = torch.tensor([plane.data_ptr() for plane in planes], dtype=torch.int64)
    return pointers.to(planes[0].device, non_blocking=True)
