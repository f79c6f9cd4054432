"""Changes of single logits that requests ask for, made where the logits are and taken back: nothing
else of a row is touched, and nothing of torch runs, whose threads would spin on after it.

The arithmetic is that of :mod:`hardpoint_runtime.sampling.edits`, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.batch import SamplingBatch
    from hardpoint_runtime.sampling.edits import Penalties, Places
    from torch import Tensor

Numbers = np.ndarray[Any, np.dtype[np.float32]]


def are_sparse(logits: Tensor, batch: SamplingBatch) -> bool:
    """Whether all that ``batch`` changes are single logits, and these can be changed in place."""
    changing = batch.processors is not None and batch.processors.changing
    whole_rows = bool(batch.grammar) or batch.allowed is not None or changing
    return not whole_rows and logits.dtype == torch.float32 and logits.is_contiguous()


@contextlib.contextmanager
def edited(logits: Tensor, batch: SamplingBatch) -> Iterator[Tensor]:
    """Lend ``logits`` [n, V] as the requests of ``batch`` want them; they are as before after it.
    Called where :func:`are_sparse` says so.
    """
    numbers: Numbers = logits.view(-1).numpy()
    vocabulary = logits.shape[1]
    kept: list[tuple[Any, Numbers]] = []

    def take(places: Places) -> Any:
        flat = places.rows.astype(np.int64) * vocabulary + places.ids
        kept.append((flat, numbers[flat]))
        return flat

    try:
        if batch.banned is not None:
            numbers[take(batch.banned)] = -np.inf
        if batch.bias is not None:
            places, values = batch.bias
            numbers[take(places)] += values
        if batch.penalties is not None:
            flat = take(batch.penalties.places)
            numbers[flat] = _penalised(numbers[flat], batch.penalties)
        yield logits
    finally:
        for flat, before in reversed(kept):
            numbers[flat] = before


def _penalised(values: Numbers, penalties: Penalties) -> Numbers:
    given = (penalties.repetition, penalties.frequency, penalties.presence, penalties.counts)
    repetition, frequency, presence, counts = (each.astype(np.float32) for each in given)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(values > 0, values / repetition, values * repetition)
        left: Numbers = values - frequency * counts - presence * (counts > 0).astype(np.float32)
    return left
