"""Changes of logits [n, V] that a request asked for, as sparse edits: (row, id) -> new value.

Order: allowed ids, then bad words and minimum length, bias, penalties. Each is applied in place on
a float32 copy. Only rows whose requests ask are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hardpoint_runtime.batch.columns import Array

if TYPE_CHECKING:
    from hardpoint_runtime.sampling.kept import TokenCounts

ToDevice = Callable[[Any, torch.dtype], Tensor]
"""``DeviceOps.to_device``."""
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""The operation ``penalise``, as :func:`penalise_places`."""


@frozen(kw_only=True, eq=False)
class Places:
    """Entries of a logits matrix: ``rows[i]``, ``ids[i]`` for i < m; each place at most once."""

    rows: Array
    ids: Array

    @classmethod
    def of_rows(cls, rows: Sequence[int], ids: Sequence[Array]) -> Places:
        """The places ``ids[i]`` of each of the ``rows``, of which there is at least one."""
        return cls(rows=np.repeat(rows, [*map(len, ids)]), ids=np.concatenate(ids))

    def flat(self, vocabulary: int, to_device: ToDevice) -> Tensor:
        """Return their places int64 [m] in the flattened matrix."""
        return to_device(self.rows.astype(np.int64) * vocabulary + self.ids, torch.int64)


def allow_only(logits: Tensor, allowed: Places, to_device: ToDevice) -> None:
    """Forbid, in every row that has allowed ids, all others."""
    flat = allowed.flat(logits.shape[1], to_device)
    kept = logits.view(-1).index_select(0, flat)
    rows = to_device(np.flatnonzero(np.bincount(allowed.rows)), torch.int64)
    logits.index_fill_(0, rows, -torch.inf)
    logits.view(-1).index_copy_(0, flat, kept)


def forbid(logits: Tensor, places: Places, to_device: ToDevice) -> None:
    """Forbid single tokens."""
    logits.view(-1).index_fill_(0, places.flat(logits.shape[1], to_device), -torch.inf)


def add_bias(logits: Tensor, places: Places, values: Array, to_device: ToDevice) -> None:
    """Add values to single logits."""
    flat = places.flat(logits.shape[1], to_device)
    logits.view(-1).index_add_(0, flat, to_device(values, torch.float32))


@frozen(kw_only=True, eq=False)
class Penalties:
    """What the rows with penalties have said so far: for each place, how often in the output
    (``counts``), and that row's three penalties (all float32 [m]).
    """

    places: Places
    counts: Array
    repetition: Array
    frequency: Array
    presence: Array


def gather_penalties(
    rows: Sequence[int],
    counted: Sequence[TokenCounts],
    parameters: Mapping[str, Array],
) -> Penalties:
    """Join what is counted of each row: ``counted[i]`` is of row ``rows[i]``, ``parameters`` its
    three penalties by column name.
    """
    lengths = [len(each.ids) for each in counted]
    spread = {name: np.repeat(values, lengths) for name, values in parameters.items()}
    return Penalties(
        places=Places.of_rows(rows, [each.ids for each in counted]),
        counts=np.concatenate([each.counts for each in counted]),
        repetition=spread["repetition_penalty"],
        frequency=spread["frequency_penalty"],
        presence=spread["presence_penalty"],
    )


def penalise(
    logits: Tensor, penalties: Penalties, to_device: ToDevice, apply: Penalise | None = None
) -> None:
    """Apply the penalties in place, by ``apply``; None: :func:`penalise_places`."""
    flat = penalties.places.flat(logits.shape[1], to_device)
    host = np.stack(
        (penalties.repetition, penalties.frequency, penalties.presence, penalties.counts)
    )
    repetition, frequency, presence, counts = to_device(
        host.astype(np.float32, copy=False), torch.float32
    )
    (apply or penalise_places)(logits, flat, repetition, frequency, presence, counts)


def penalise_places(
    logits: Tensor,
    places: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """Penalise the logits [n, V] in place: the built-in operation ``penalise``. ``places`` int64
    [m] are flat, each once; the others float32 [m].

    Repetition r (Keskar et al. 2019, for negative logits as the field does): over prompt and
    output, x > 0 becomes x / r, else x * r. Then, for what the output holds: minus frequency *
    count (how often), minus presence.
    """
    values = logits.view(-1).index_select(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0).to(torch.float32)
    logits.view(-1).index_copy_(0, places, values)
