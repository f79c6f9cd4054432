"""Filling a model from a stream of weights: names and shapes first, then one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CancelledStepError, CheckpointError
from torch import Tensor

from hardpoint_runtime.loading.weights import Weights


class LoadableModel(Protocol):
    """What a model offers to be loaded."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name, as in a Hugging Face checkpoint, and shape of each tensor the model needs."""

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, whole and on the host, into its place (a part of a fused one, too)."""


def check_weights(expected: Mapping[str, tuple[int, ...]], weights: Weights) -> None:
    """Raise CheckpointError, naming the tensors, unless the weights are exactly those expected.

    Costs nothing but names, so it is called before the model's memory is allocated.
    """
    if missing := [name for name in expected if name not in weights.shapes]:
        raise CheckpointError(f"{len(missing)} weights of the model are missing: {some(missing)}")
    if extra := [name for name in weights.shapes if name not in expected]:
        raise CheckpointError(f"{len(extra)} weights have no place in the model: {some(extra)}")
    for name, shape in expected.items():
        if tuple(weights.shapes[name]) != tuple(shape):
            raise CheckpointError(
                f"weight {shown(name)} has shape {list(weights.shapes[name])}, but its place in "
                f"the model has {list(shape)}"
            )


def load_into(
    model: LoadableModel,
    weights: Weights,
    dtype: torch.dtype,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Load every tensor into the model and return the bytes that were given to it.

    Called in the worker. ``cancelled`` is asked before each tensor; when it is true,
    CancelledStepError is raised and the model is unfinished. Raises CheckpointError for missing,
    extra or misshapen tensors before the first one is read.
    """
    check_weights(model.weight_shapes(), weights)
    given = 0
    stream = weights.iterate(dtype)
    while True:
        if cancelled():
            raise CancelledStepError(f"loading was ended after {given} bytes of weights")
        following = next(stream, None)
        if following is None:
            return given
        name, tensor = following
        model.load_weight(name, tensor)
        given += tensor.nbytes
        del following, tensor  # before the next one is read, so that one is alive at a time
