"""What a worker is called, in ``ps`` and before its lines (row E3b)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint.config import Config


def title_of(config: Config, rank: int, world_size: int) -> str:
    """Return the name of ``rank``: its place in every dimension that has several, as in
    ``Worker_PP1_TP0``; where none has, its bare rank, and nothing for a single worker.

    Ranks run through tensor parallelism fastest, then pipeline stages, then copies of the model.
    """
    parallel = config.parallel
    sizes = (
        ("TP", parallel.tensor_parallel_size),
        ("PP", parallel.pipeline_parallel_size),
        ("DP", parallel.data_parallel_size),
    )
    parts, left = [], rank
    for name, size in sizes:
        if size > 1:
            parts.append(f"{name}{left % size}")
        left //= size
    if left or not parts:  # more workers than the sizes say
        parts = [str(rank)] if world_size > 1 else []
    return "_".join(["Worker", *reversed(parts)])
