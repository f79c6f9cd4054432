"""The operation ``penalise``: repetition, frequency and presence at the places that they reach."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_runtime.kernels.launches import EXACT, launched

PLACES = 256
"""Places that a program changes."""


@triton.jit
def penalise_kernel(
    logits, places, repetition, frequency, presence, counts, num_places, PLACES: tl.constexpr
):
    """Change a part of the places."""
    index = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    inside = index < num_places
    place = tl.load(places + index, mask=inside, other=0)
    factor = tl.load(repetition + index, mask=inside, other=1.0)
    count = tl.load(counts + index, mask=inside, other=0.0)
    value = tl.load(logits + place, mask=inside, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value -= tl.load(frequency + index, mask=inside, other=0.0) * count
    said = tl.where(count > 0, 1.0, 0.0)
    value -= tl.load(presence + index, mask=inside, other=0.0) * said
    tl.store(logits + place, value, mask=inside)


@launched
def penalise(
    logits: torch.Tensor,
    places: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Penalise as :func:`hardpoint_runtime.sampling.edits.penalise_places` does."""
    if len(places):
        penalise_kernel[(triton.cdiv(len(places), PLACES),)](
            logits, places, repetition, frequency, presence, counts, len(places),
            PLACES=PLACES, **EXACT,
        )  # fmt: skip
