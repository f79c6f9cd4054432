"""A model's weights from wherever the configuration says, in the way that they are to be held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hardpoint.checkpoints.sharded_state import SHARDED_STATE
from hardpoint.errors import UnsupportedError

from hardpoint_runtime.description import described
from hardpoint_runtime.loading import load_into, open_weights
from hardpoint_runtime.loading.sharded_state import load_sharded_state
from hardpoint_runtime.quantization.loading import load_packed

if TYPE_CHECKING:
    from hardpoint.records import WorkerContext

    from hardpoint_runtime.models.language_model import LanguageModel
    from hardpoint_runtime.operations import Offers
    from hardpoint_runtime.quantization.method import Quantization


def load_checkpoint(
    model: LanguageModel,
    context: WorkerContext,
    registry: Offers,
    platform_name: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
) -> None:
    """Load every weight, packed by ``quantization`` where there is one. Called in the worker.

    Raises UnsupportedError for a state that was saved as it was in memory, if it is to be packed.
    """
    description, config = described(context), context.config.model
    if description.format == SHARDED_STATE:
        if config.quantization is not None:
            raise UnsupportedError(
                f"quantization = {config.quantization!r}", "a sharded state",
                reason="it is loaded as it was in memory", hint="Load the original model.",
            )  # fmt: skip
        load_sharded_state(model, description.path, context)
        return
    with open_weights(
        description, seed=config.seed or 0, registry=registry, platform_name=platform_name
    ) as weights:
        if quantization is None:
            load_into(model, weights, dtype, context.cancelled)
        else:
            load_packed(model, weights, quantization, dtype, context.cancelled)
