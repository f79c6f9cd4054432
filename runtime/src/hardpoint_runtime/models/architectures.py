"""Which architectures there are, and building one. Called once by the model runner, in the
worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import UnsupportedModelError
from hardpoint.references import resolve

from hardpoint_runtime.device import DeviceOps
from hardpoint_runtime.models.language_model import LanguageModel
from hardpoint_runtime.operations import Offers, Operations

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "hardpoint_runtime.models.llama:LlamaForCausalLM",
}
"""Architecture (the Hugging Face class name) -> reference of its built-in model."""


def build_model(
    description: ModelDescription,
    operations: Operations,
    device: DeviceOps,
    dtype: torch.dtype,
    *,
    registry: Offers | None = None,
    platform_name: str = "any",
) -> LanguageModel:
    """Return the model of ``description`` with uninitialised weights on ``device``.

    An architecture offered by the hook ``hardpoint_models`` wins over a built-in one. Raises
    UnsupportedModelError with the list of those known, UnsupportedError for a variant that the
    architecture's model does not know.
    """
    offers = registry.offers("hardpoint_models", platform_name) if registry else {}
    known = {**ARCHITECTURES, **{name: offer.reference for name, offer in offers.items()}}
    reference = known.get(description.architecture)
    if reference is None:
        raise UnsupportedModelError(
            f"{description.path}: architecture {description.architecture!r} is not supported; "
            f"supported are {', '.join(sorted(known))}"
        )
    model_class = resolve(reference)
    with torch.device("meta"):
        model: LanguageModel = model_class(description, operations)
    with device.pool("weights"):
        model.materialise(device.device, dtype)
    return model.eval()
