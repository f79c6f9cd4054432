"""The winning rule of offers: the selected platform's, then ``any``, then the built-in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hardpoint.discovery import Plugin
from hardpoint.errors import PluginConflictError
from hardpoint.records import AnyPlatform, Offer, Operation

UNUSED = (
    "hardpoint_drafters",
    "hardpoint_kv_connectors",
    "hardpoint_ec_connectors",
    "hardpoint_weight_transfers",
)
"""Hooks of the contract whose offers nothing takes up in this version; whoever implements one is
told.
"""
PluginOffer = tuple[Plugin, Offer]
"""An offer and the plugin that made it."""


def chosen_offers(
    hook: str,
    platform: str,
    offers: Iterable[PluginOffer],
    description: Mapping[str, object] | None = None,
) -> dict[str, Offer]:
    """Return name -> the offer that wins for ``platform``; a name absent here is the built-in's.

    With ``description``, an Operation whose ``supports`` gives a reason against it is passed over.
    Raises PluginConflictError naming both plugins of a tie between winners.
    """
    levels: dict[tuple[str, str], list[PluginOffer]] = {}
    for plugin, offer in offers:
        if offer.platform in (platform, AnyPlatform) and not reason_against(offer, description):
            levels.setdefault((offer.name, offer.platform), []).append((plugin, offer))
    own = {name: rivals for (name, level), rivals in levels.items() if level != AnyPlatform}
    general = {name: rivals for (name, level), rivals in levels.items() if level == AnyPlatform}
    winners = general | own  # what loses to the platform's own is no tie
    for rivals in winners.values():
        if len(rivals) > 1:
            raise _tie(hook, *rivals[:2])
    return {name: rivals[0][1] for name, rivals in winners.items()}


def reason_against(offer: Offer, description: Mapping[str, object] | None) -> str | None:
    """Return why an operation cannot serve what ``description`` asks, or None."""
    if description is None or not isinstance(offer, Operation) or offer.supports is None:
        return None
    return offer.supports(description)


def _tie(hook: str, first: PluginOffer, second: PluginOffer) -> PluginConflictError:
    name, platform = first[1].name, first[1].platform
    where = "any platform" if platform == AnyPlatform else f"platform {platform!r}"
    sides = " and ".join(f"{offer.reference} of {p.label}" for p, offer in (first, second))
    loser = second[0].name
    return PluginConflictError(
        f"{hook}: {name!r} for {where} is offered by {sides}. Name one of the plugins in "
        f"plugins.disable (HARDPOINT_DISABLE={loser})"
    )
