"""Weights from files into a model, in the worker: read, unpacked and handed over one by one."""

from __future__ import annotations

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.weight_source import offered_source
from hardpoint.errors import UnsupportedModelError

from hardpoint_runtime.loading.gguf import GGUFWeights
from hardpoint_runtime.loading.model_loading import LoadableModel, check_weights, load_into
from hardpoint_runtime.loading.random import RandomWeights
from hardpoint_runtime.loading.safetensors import SafetensorsWeights
from hardpoint_runtime.loading.source import SourceWeights
from hardpoint_runtime.loading.weights import Weights
from hardpoint_runtime.operations import Offers

__all__ = ["LoadableModel", "Weights", "check_weights", "load_into", "open_weights"]


def open_weights(
    description: ModelDescription,
    *,
    seed: int = 0,
    registry: Offers | None = None,
    platform_name: str = "any",
) -> Weights:
    """Open the weights of a described model; use as a context, or close it.

    Tables are read again and checked, and every tensor's type is known to be readable, before the
    first byte of data is touched. ``seed`` is for ``dummy``, whose weights are random. A loader
    that a plugin offers for the description's format (hook ``hardpoint_weight_loaders``: it gives
    a WeightSource, or Weights if it is offered for torch platforms alone) wins over the built-in
    one. Raises CheckpointError, and UnsupportedModelError for a format or tensor type that is not
    known.
    """
    offers = registry.offers("hardpoint_weight_loaders", platform_name) if registry else {}
    offered = offered_source(offers, description, Weights)
    if offered is not None:
        return offered if isinstance(offered, Weights) else SourceWeights(offered)
    if description.format == "gguf":
        return GGUFWeights(description)
    if description.format == "safetensors":
        return SafetensorsWeights(description)
    if description.format == "dummy":
        return RandomWeights(description, seed)
    raise UnsupportedModelError(
        f"{description.path}: no weights are read from the format {description.format!r}; "
        f"supported: gguf, safetensors, dummy"
    )
