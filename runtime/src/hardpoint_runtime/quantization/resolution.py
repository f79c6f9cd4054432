"""Which quantisation the configuration names."""

from __future__ import annotations

import torch
from hardpoint.config import Config
from hardpoint.errors import ConfigError
from hardpoint.references import resolve_class

from hardpoint_runtime.operations import Offers
from hardpoint_runtime.quantization.method import Quantization

HOOK = "hardpoint_quantizations"


def named_quantization(
    config: Config, registry: Offers, platform_name: str, dtype: torch.dtype
) -> Quantization | None:
    """Return the offered one that the key ``quantization`` names; None where it is unset. Raises
    ConfigError for a name that nothing offers here.
    """
    name = config.model.quantization
    if name is None:
        return None
    offers = registry.offers(HOOK, platform_name)
    if name not in offers:
        known = ", ".join(sorted(offers)) or "none"
        raise ConfigError(
            f"quantization = {name!r}: platform {platform_name!r} offers {known}; leave the key "
            "out, or choose another platform"
        )
    made: Quantization = resolve_class(offers[name].reference, Quantization)(config, dtype)
    return made
