"""Filling a model from a stream of weights: names and shapes first, then one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from hardpoint.checkpoints.tables import shown, some
from hardpoint.errors import CancelledStepError, CheckpointError
from torch import Tensor

from hardpoint_runtime.loading.weights import Weights
from hardpoint_runtime.quantization.packed_form import StoredRows


class LoadableModel(Protocol):
    """What a model offers to be loaded."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name, as in a Hugging Face checkpoint, and shape of each tensor the model needs."""

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may bring this tensor although the model has no use for it."""

    def load_weight(self, name: str, tensor: Tensor | StoredRows) -> None:
        """Take one tensor, whole and on the host, into its place (a part of a fused one, too).
        Rows as they are stored come only for what is held packed.
        """


def check_weights(model: LoadableModel, weights: Weights) -> Mapping[str, tuple[int, ...]]:
    """Return what the model needs; raise CheckpointError, naming the tensors, unless the weights
    are just that, in the right shapes, besides what is ignorable.

    Costs names only: nothing is read.
    """
    expected, held = model.weight_shapes(), weights.shapes
    if missing := [name for name in expected if name not in held]:
        raise CheckpointError(f"{len(missing)} weights of the model are missing: {some(missing)}")
    extra = [name for name in held if name not in expected and not model.is_ignorable(name)]
    if extra:
        raise CheckpointError(
            f"{len(extra)} weights have no place in the model as its configuration describes it: "
            f"{some(extra)}"
        )
    for name, shape in expected.items():
        if tuple(held[name]) != tuple(shape):
            raise CheckpointError(
                f"weight {shown(name)} has shape {list(held[name])}, but its place in the model "
                f"has {list(shape)}"
            )
    return expected


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
    expected = check_weights(model, weights)
    return pour(model, weights.iterate(dtype, expected), cancelled)


def pour(
    model: LoadableModel,
    stream: Iterator[tuple[str, Tensor | StoredRows]],
    cancelled: Callable[[], bool],
) -> int:
    """Give every weight of ``stream`` to the model; return their bytes. See :func:`load_into`."""
    with _one_thread():
        return _pour(model, stream, cancelled)


def _pour(
    model: LoadableModel,
    stream: Iterator[tuple[str, Tensor | StoredRows]],
    cancelled: Callable[[], bool],
) -> int:
    given = 0
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch's host operations on the calling thread, and restore its number afterwards.

    Unpacking and copying are bound by memory, so a second thread gains little; but each of some
    thousand operations would wait for it, which on a busy machine takes far longer than the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
