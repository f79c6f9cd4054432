"""What AMD GPUs can do, by the name of their instruction set (gfx...).

Listed are those that Triton compiles for, which a test tries. Lanes and shared memory: LLVM's page
"User Guide for AMDGPU Backend" and its features of the targets (``AddressableLocalMemorySize``).
Types: the CDNA and RDNA instruction set manuals.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Features:
    """``wave`` is how many lanes run together. ``bfloat16``: its matrix units multiply that.
    ``float8`` is the form of 8-bit numbers that they multiply: ``fnuz`` (no negative zero, no
    infinity) or ``ocp`` (that of other vendors), None without. ``lds_kib``: what one group of work
    may share.
    """

    architecture: str
    wave: int
    bfloat16: bool
    float8: str | None = None
    lds_kib: int = 64


CDNA1 = Features(architecture="CDNA", wave=64, bfloat16=True)
CDNA2 = Features(architecture="CDNA 2", wave=64, bfloat16=True)
CDNA3 = Features(architecture="CDNA 3", wave=64, bfloat16=True, float8="fnuz")
CDNA4 = Features(architecture="CDNA 4", wave=64, bfloat16=True, float8="ocp", lds_kib=160)
RDNA3 = Features(architecture="RDNA 3", wave=32, bfloat16=True)
RDNA4 = Features(architecture="RDNA 4", wave=32, bfloat16=True, float8="ocp")

FEATURES: dict[str, Features] = {
    "gfx908": CDNA1,
    "gfx90a": CDNA2,
    "gfx942": CDNA3,
    "gfx950": CDNA4,
    "gfx1100": RDNA3,
    "gfx1101": RDNA3,
    "gfx1102": RDNA3,
    "gfx1103": RDNA3,
    "gfx1150": RDNA3,
    "gfx1151": RDNA3,
    "gfx1152": RDNA3,
    "gfx1153": RDNA3,
    "gfx1200": RDNA4,
    "gfx1201": RDNA4,
}


def features_of(name: str) -> Features | None:
    """Return what a GPU of that instruction set can do (``gfx90a:sramecc+`` is a ``gfx90a``); None
    for one that the kernels are not made for.
    """
    return FEATURES.get(name.partition(":")[0])


def name_of(version: int) -> str:
    """Return the name that the kernel's driver writes as a number: 90402 is ``gfx942``, 90010
    ``gfx90a``.
    """
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"
