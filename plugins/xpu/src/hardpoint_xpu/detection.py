"""Which GPUs could be used here? Read off files and variables; Level Zero is never initialised."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.records import Device
from hardpoint_runtime.accelerator.surroundings import Sighting, Surroundings

from hardpoint_xpu.masks import AFFINITY, MaskError, Root, shown
from hardpoint_xpu.selector import SELECTOR, selected
from hardpoint_xpu.system_files import Card, find_cards


def look(around: Surroundings) -> Sighting:
    """Look for GPUs. Raises nothing; every reason against them is told at once."""
    reasons = [*around.without_torch("xpu", "XPU")]
    found = find_cards(around)
    reasons += found.reasons
    roots: tuple[Root, ...] = ()
    try:
        every = shown([card.tiles for card in found.cards], around.environ)
        taken = selected(around.environ.get(SELECTOR), len(every))
        roots = tuple(every[place] for place in taken)
    except MaskError as error:
        reasons.append(str(error))
    else:
        if found.cards and not roots:
            reasons.append(_hidden(around))
    cards = [found.cards[root.card] for root in roots]
    return Sighting(
        devices=() if reasons else tuple(map(_device, range(len(roots)), roots, cards)),
        features=_common(cards),
        reasons=tuple(reasons),
        notes=_notes(cards),
    )


def _hidden(around: Surroundings) -> str:
    names = [name for name in (AFFINITY, SELECTOR) if name in around.environ]
    values = " and ".join(f"{name}={around.environ[name]}" for name in names)
    return f"{values} leave no GPU"


def _common(cards: Sequence[Card]) -> dict[str, object]:
    known = [card.family.bfloat16 for card in cards if card.family is not None]
    return {"bfloat16": all(known)} if known else {}


def _notes(cards: Sequence[Card]) -> tuple[str, ...]:
    unknown = sorted({card.name for card in cards if card.family is None})
    if not unknown:
        return ()
    return (f"{', '.join(unknown)}: not listed, the worker asks torch whether it has bfloat16",)


def _device(number: int, root: Root, card: Card) -> Device:
    size = card.memory_bytes
    return Device(
        id=str(number),
        name=card.name,
        memory_bytes=None if size is None else size * root.tiles // card.tiles,
    )
