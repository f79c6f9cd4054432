"""ZE_AFFINITY_MASK: which devices Level Zero shows. A filter: it changes no order.

Devices are numbered as ZE_FLAT_DEVICE_HIERARCHY says: FLAT (the default) and COMBINED count tiles,
COMPOSITE counts cards, ``1.0`` being the first tile of card 1. An empty mask, or ``default``, hides
nothing. So it stands in Intel's compute-runtime, ``ExecutionEnvironment::parseAffinityMask``, which
passes over in silence what is an error here: names of another hierarchy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

AFFINITY, HIERARCHY = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"
HIERARCHIES = ("FLAT", "COMPOSITE", "COMBINED")
EVERYTHING = ("", "default")


@frozen(kw_only=True)
class Root:
    """One device that Level Zero shows: a card, or one tile of it where tiles are counted. ``card``
    is its place among the system's cards, ``tiles`` how many of it are used.
    """

    card: int
    tiles: int = 1


class MaskError(ValueError):
    """A variable that cannot be understood; the text says what and where."""


def shown(tiles: Sequence[int], environ: Mapping[str, str]) -> tuple[Root, ...]:
    """Return what Level Zero shows of cards with so many ``tiles`` each. Raises MaskError."""
    hierarchy = environ.get(HIERARCHY) or "FLAT"
    if hierarchy not in HIERARCHIES:
        raise MaskError(f"{HIERARCHY}={hierarchy} is none of {', '.join(HIERARCHIES)}")
    mask = environ.get(AFFINITY)
    if mask in EVERYTHING:
        mask = None
    parts = [] if mask is None else [part.strip() for part in mask.split(",") if part.strip()]
    if hierarchy != "COMPOSITE":
        flat = [card for card, count in enumerate(tiles) for _ in range(count)]
        kept = {_number(part, mask) for part in parts} if mask is not None else range(len(flat))
        return tuple(Root(card=card) for place, card in enumerate(flat) if place in kept)
    wanted = [set(range(count)) for count in tiles]
    if mask is not None:
        wanted = [set() for _ in tiles]
        for part in parts:
            card, _, tile = part.partition(".")
            place = _number(card, mask)
            if place < len(tiles):
                chosen = {_number(tile, mask)} if tile else set(range(tiles[place]))
                wanted[place] |= chosen & set(range(tiles[place]))
    return tuple(Root(card=card, tiles=len(used)) for card, used in enumerate(wanted) if used)


def _number(text: str, mask: str | None) -> int:
    if not text.isdecimal():
        raise MaskError(f"{AFFINITY}={mask}: {text!r} is not the number of a device here")
    return int(text)
