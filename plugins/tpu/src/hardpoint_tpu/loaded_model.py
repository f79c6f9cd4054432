"""The model on the devices: loaded, put to sleep with or without a host copy, loaded again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from hardpoint.checkpoints import ModelDescription, WeightSource
from hardpoint.errors import LifecycleError
from hardpoint.records import LoadReport
from jax.sharding import Mesh
from numpy.typing import NDArray

from hardpoint_tpu.params import (
    LlamaParams,
    Recipe,
    all_recipes,
    load_params,
    needed_shapes,
    placed,
    whole_tensors,
)
from hardpoint_tpu.shape import ModelShape


class LoadedModel:
    """A Llama's parameters on ``mesh``. What ``Worker.get_model`` returns.

    ``params`` are the arrays; a step reads them anew, so that they can be replaced between steps.
    """

    def __init__(
        self, description: ModelDescription, shape: ModelShape, mesh: Mesh, dtype: Any
    ) -> None:
        self.description = description
        self.shape = shape
        self.mesh = mesh
        self.dtype = np.dtype(dtype)
        self._params: LlamaParams | None = None
        self._backup: LlamaParams | None = None
        self._layout: LlamaParams | None = None

    @property
    def params(self) -> LlamaParams:
        """The arrays. Raises LifecycleError while there are none."""
        if self._params is None:
            raise LifecycleError("the model has no weights in memory: it is not loaded, or sleeps")
        return self._params

    @property
    def num_bytes(self) -> int:
        """Bytes held on the devices."""
        return 0 if self._params is None else device_bytes(self._params.arrays())

    def load(
        self, open_source: Callable[[], WeightSource], cancelled: Callable[[], bool]
    ) -> LoadReport:
        """Read all weights. What was there goes first: both would not fit."""
        started = time.perf_counter()
        with open_source() as source:
            self.release(keep=False)
            params = load_params(source, self.shape, self.mesh, self.dtype, cancelled)
        jax.block_until_ready(params.arrays())
        self._params = params
        return LoadReport(weight_bytes=self.num_bytes, seconds=time.perf_counter() - started)

    def release(self, *, keep: bool) -> int:
        """Give the devices' memory back; with ``keep``, copy to the host first. Return the bytes
        copied.
        """
        params, self._params = self._params, None
        if params is None:
            self._backup = self._backup if keep else None
            return 0
        self._layout = params.mapped(lambda _, array: _outline(array), self.shape)
        # On the CPU the host's view would be the device's own memory, so it is copied.
        self._backup = (
            params.mapped(lambda _, array: np.array(array, copy=True), self.shape) if keep else None
        )
        for array in params.arrays():
            array.delete()
        return 0 if self._backup is None else sum(each.nbytes for each in self._backup.arrays())

    def restore(self) -> None:
        """Take the devices' memory again: with the host's copy, or with zeros where there is none,
        until the weights are loaded anew.
        """
        source = self._backup or self._layout
        if self._params is not None or source is None:
            return

        def put(recipe: Recipe, array: Any) -> jax.Array:
            host = array if isinstance(array, np.ndarray) else np.zeros(array.shape, array.dtype)
            return placed(host, self.mesh, recipe.spec)

        self._params = source.mapped(put, self.shape)
        self._backup = None

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield every tensor, whole, under its name in a checkpoint."""
        return whole_tensors(self.params, self.shape)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, in the order of :meth:`tensors`."""
        return needed_shapes(self.shape, all_recipes(self.shape))

    def described_by(self, description: ModelDescription) -> None:
        """Adopt the description of files that hold the same model. Raises LifecycleError for
        another shape: what is compiled fits this one only.
        """
        if ModelShape.of(description, self.shape.devices) != self.shape:
            raise LifecycleError(
                f"{description.path} holds a model of another shape than {self.description.path}; "
                "start a new engine for it"
            )
        self.description = description


def device_bytes(arrays: list[jax.Array]) -> int:
    """Return the bytes of arrays on all devices; what every device holds counts for each."""
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def _outline(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
