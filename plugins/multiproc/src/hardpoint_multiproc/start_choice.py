"""How workers are started: forked by a nursery that has everything imported, or plain."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from attrs import frozen
from hardpoint.records import ForkSafety

NURSERY, PLAIN = "nursery", "plain"

READ_EARLY = (
    "LD_*",
    "DYLD_*",
    "MALLOC_*",
    "GLIBC_TUNABLES",
    "MIMALLOC_*",
    "*_VISIBLE_DEVICES",
    "*_DEVICE_ORDER",
    "*ALLOC_CONF",
    "*_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
    "SYCL_*",
    "OMP_*",
    "KMP_*",
    "GOMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "PYTHON*",
)
"""Variables that the loader, an allocator, a runtime or the interpreter reads once, as it starts or
is imported: in a process that is forked afterwards they come too late.
"""


@frozen(kw_only=True)
class Way:
    """How workers start, and why."""

    kind: str
    reason: str


def read_early(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of a worker's own ``variables`` that must be set before its process starts."""
    return tuple(name for name in variables if any(fnmatchcase(name, form) for form in READ_EARLY))


def choose(setting: str, safety: ForkSafety, variables: Mapping[str, str]) -> Way:
    """Return the way of ``plugins.mp.start = setting``, for a platform that says ``safety`` and
    wants ``variables`` in its workers.

    Raises ValueError, saying why, where a nursery was asked for by name and cannot be.
    """
    early = read_early(variables)
    obstacle = ""
    if not safety.safe:
        obstacle = f"the platform cannot be forked: {safety.reason}"
    elif early:
        obstacle = f"workers need {', '.join(early)} set before they start"
    if setting == PLAIN:
        return Way(kind=PLAIN, reason="as configured")
    if not obstacle:
        return Way(kind=NURSERY, reason="nothing keeps workers from being forked")
    if setting == NURSERY:
        raise ValueError(obstacle)
    return Way(kind=PLAIN, reason=obstacle)
