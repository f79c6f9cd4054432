"""Which Intel GPUs compute in bfloat16: a table by PCI device number.

Numbers: Linux's ``include/drm/intel/pciids.h``. Types: Intel's compute-runtime, by graphics
release (``ReleaseHelper::isBFloat16ConversionSupported``: Alchemist and what came after, of Xe-LPG
12.74 only); what is newer than the table is not guessed, the worker asks torch. The A770 has the
units and a known fault of accuracy (vLLM: ``XPUPlatform.check_if_supports_dtype``): it counts as
without.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Family:
    """GPUs of one generation: the beginnings of their PCI device numbers."""

    name: str
    numbers: tuple[str, ...]
    bfloat16: bool


FAMILIES: tuple[Family, ...] = (
    Family(name="Data Center GPU Max", numbers=("0x0bd", "0x0be", "0x0b6"), bfloat16=True),
    Family(name="Data Center GPU Flex", numbers=("0x56c",), bfloat16=True),
    Family(name="Arc A770", numbers=("0x56a0", "0x5690"), bfloat16=False),
    Family(name="Arc A", numbers=("0x569", "0x56a", "0x56b"), bfloat16=True),
    Family(name="Arc B", numbers=("0xe20", "0xe21", "0xe22"), bfloat16=True),
    Family(name="Arc graphics of Lunar Lake", numbers=("0x64",), bfloat16=True),
    Family(name="Arc graphics of Panther Lake", numbers=("0xb0",), bfloat16=True),
    Family(name="Arc graphics of Arrow Lake H", numbers=("0x7d51", "0x7dd1"), bfloat16=True),
    Family(
        name="graphics of Arrow Lake U and S",
        numbers=("0x7d41", "0x7d67", "0xb640"),
        bfloat16=False,
    ),
    Family(
        name="Arc graphics of Meteor Lake",
        numbers=("0x7d4", "0x7d5", "0x7d60", "0x7dd5"),
        bfloat16=False,
    ),
    Family(name="Iris Xe", numbers=("0x9a", "0x46", "0xa7", "0x4c", "0x49"), bfloat16=False),
)
"""The longest number that fits counts."""


def family_of(number: str) -> Family | None:
    """Return the family of the PCI device ``number`` (``0x56a0``); None for one not listed."""
    fits = [
        (len(start), family)
        for family in FAMILIES
        for start in family.numbers
        if number.lower().startswith(start)
    ]
    return max(fits, key=lambda each: each[0])[1] if fits else None
