"""Which architectures there are, and building one. Called once by the model runner, in the
worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES as DECODERS
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import UnsupportedError, UnsupportedModelError
from hardpoint.references import resolve

from hardpoint_runtime.device import DeviceOps
from hardpoint_runtime.models.language_model import LanguageModel
from hardpoint_runtime.operations import Offers, Operations
from hardpoint_runtime.parallel.seat import ALONE, Seat

ARCHITECTURES: Mapping[str, str] = dict.fromkeys(
    DECODERS, "hardpoint_runtime.models.decoder:DecoderForCausalLM"
)
"""Architecture (the Hugging Face class name) -> reference of its built-in model."""
FOREIGN = "hardpoint_runtime.models.foreign:ForeignModel"
"""What is tried for any other."""


def attention_needs(
    description: ModelDescription, registry: Offers | None = None, platform_name: str = "any"
) -> Mapping[str, object]:
    """Return what the described model will ask of attention; for the ``supports`` of what plugins
    offer. See :meth:`LanguageModel.attention_needs`.
    """
    reference = _known(registry, platform_name).get(description.architecture, FOREIGN)
    model_class: type[LanguageModel] = resolve(reference)
    return model_class.attention_needs(description)


def _known(registry: Offers | None, platform_name: str) -> Mapping[str, str]:
    offers = registry.offers("hardpoint_models", platform_name) if registry else {}
    return {**ARCHITECTURES, **{name: offer.reference for name, offer in offers.items()}}


def build_model(
    description: ModelDescription,
    operations: Operations,
    device: DeviceOps,
    dtype: torch.dtype,
    *,
    registry: Offers | None = None,
    platform_name: str = "any",
    seat: Seat = ALONE,
) -> LanguageModel:
    """Return the model of ``description``, or the part of it that ``seat`` has, with uninitialised
    weights on ``device``.

    An architecture offered by the hook ``hardpoint_models`` wins over a built-in one; for any other
    transformers' code is used, if it can be. Raises UnsupportedModelError with the reason and those
    built in, UnsupportedError for several ranks where a model is only ever whole.
    """
    known = _known(registry, platform_name)
    reference = known.get(description.architecture, FOREIGN)
    model_class = resolve(reference)
    split = _split(model_class, reference, seat)
    try:
        with torch.device("meta"):
            model: LanguageModel = model_class(description, operations, **split)
    except UnsupportedModelError as error:
        if description.architecture in known:
            raise
        raise UnsupportedModelError(f"{error}; supported are {', '.join(sorted(known))}") from error
    with device.pool("weights"):
        model.materialise(device.device, dtype)
    return model.eval()


def _split(model_class: type[LanguageModel], reference: str, seat: Seat) -> dict[str, Seat]:
    if seat.is_alone:
        return {}
    if not model_class.can_split:
        reason = "transformers' code is only ever whole" if reference == FOREIGN else "no can_split"
        raise UnsupportedError("several ranks", f"the model {reference}", reason=reason)
    return {"seat": seat}
