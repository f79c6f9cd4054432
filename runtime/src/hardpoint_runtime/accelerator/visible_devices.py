"""Variables that say which devices a process sees: a list by commas. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen


@frozen(kw_only=True)
class Chosen:
    """What a mask leaves: positions in the unmasked list, in the mask's order, and what was wrong
    with it, in words.
    """

    positions: tuple[int, ...]
    complaint: str | None = None


def entries(mask: str) -> tuple[str, ...]:
    """Return the entries of a mask; none for one that is empty."""
    return tuple(part.strip() for part in mask.split(",")) if mask.strip() else ()


def choose(mask: str, count: int, by_name: Callable[[str], Sequence[int]]) -> Chosen:
    """Return which of ``count`` devices ``mask`` leaves, as the runtimes do that read it.

    An entry is a number or a name; ``by_name`` gives the positions that a name (or its beginning)
    fits. What follows an entry that names no device, or several, is ignored; a device that is named
    twice leaves none.
    """
    positions: list[int] = []
    for entry in entries(mask):
        if entry.lstrip("+-").isdecimal():
            number = int(entry)
            found: Sequence[int] = (number,) if 0 <= number < count else ()
        else:
            found = by_name(entry)
        if len(found) != 1:
            what = "names no device" if not found else "fits several devices"
            return Chosen(positions=tuple(positions), complaint=f"{entry!r} {what}")
        if found[0] in positions:
            return Chosen(positions=(), complaint=f"{entry!r} is named twice")
        positions += found
    return Chosen(positions=tuple(positions))


def logical(ids: Sequence[str], mask: str | None) -> tuple[str, ...]:
    """Return the logical numbers of devices that a launcher gave, by what it calls them.

    A launcher that hides the others names what it gave in the mask: there they are counted from 0.
    Without a mask, and for a device that is not in it, ids are taken as they are.
    """
    listed = entries(mask) if mask is not None else ()
    return tuple(str(listed.index(each)) if each in listed else each for each in ids)
