"""Which cores each worker keeps to, where its platform does not see to that itself."""

from __future__ import annotations

from collections.abc import Sequence


def shares_of(cores: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each of ``workers``: consecutive, disjoint, as equal as can be; all of
    them for each where there are fewer cores than workers.
    """
    count = len(cores)
    if workers > count:
        return (tuple(cores),) * workers
    return tuple(
        tuple(cores[rank * count // workers : (rank + 1) * count // workers])
        for rank in range(workers)
    )
