"""What NVIDIA GPUs can do, by their compute capability.

Shared memory: NVIDIA's own table in CCCL (``cuda/__device/arch_traits.h``:
``max_shared_memory_per_block_optin``). Types: the CUDA C++ programming guide, "Compute
Capabilities".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

Version = tuple[int, int]

LEAST: Version = (7, 0)
"""The first with tensor cores."""
WITHOUT_VOLTA: Version = (7, 5)


@frozen(kw_only=True)
class Features:
    """Of one generation: which types its tensor cores multiply, and how much shared memory (KiB)
    one block may have.
    """

    generation: str
    bfloat16: bool
    float8: bool
    shared_kib: int


VOLTA = Features(generation="Volta", bfloat16=False, float8=False, shared_kib=96)
TURING = Features(generation="Turing", bfloat16=False, float8=False, shared_kib=64)
AMPERE = Features(generation="Ampere", bfloat16=True, float8=False, shared_kib=163)
SMALL_AMPERE = Features(generation="Ampere", bfloat16=True, float8=False, shared_kib=99)
ADA = Features(generation="Ada Lovelace", bfloat16=True, float8=True, shared_kib=99)
HOPPER = Features(generation="Hopper", bfloat16=True, float8=True, shared_kib=227)
BLACKWELL = Features(generation="Blackwell", bfloat16=True, float8=True, shared_kib=227)
SMALL_BLACKWELL = Features(generation="Blackwell", bfloat16=True, float8=True, shared_kib=99)

FEATURES: dict[Version, Features] = {
    (7, 0): VOLTA,
    (7, 2): VOLTA,
    (7, 5): TURING,
    (8, 0): AMPERE,
    (8, 6): SMALL_AMPERE,
    (8, 7): AMPERE,
    (8, 8): SMALL_AMPERE,
    (8, 9): ADA,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): BLACKWELL,
    (11, 0): BLACKWELL,
    (12, 0): SMALL_BLACKWELL,
    (12, 1): SMALL_BLACKWELL,
}


def least(build: Mapping[str, str | None]) -> Version:
    """Return the least that a build of torch has code for: those for CUDA 13 have none for Volta,
    and since torch 2.11 those for 12.8 and 12.9 have none either (its table of releases).
    """
    cuda, torch = _version(build.get("cuda")), _version(build.get("__version__"))
    without = cuda >= (13, 0) or (cuda >= (12, 8) and torch >= (2, 11))
    return WITHOUT_VOLTA if without else LEAST


def _version(text: str | None) -> Version:
    major, minor = (*map(int, re.findall(r"\d+", text or "")[:2]), 0, 0)[:2]
    return major, minor


def features_of(capability: Version) -> Features | None:
    """Return what a GPU can do: of one that is newer than the table, what the newest known before
    it could; None for one that is too old.
    """
    if capability < LEAST:
        return None
    return FEATURES[max(known for known in FEATURES if known <= capability)]
