"""Weights out of nothing: for a shape without files. The same seed gives the same model."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import UnsupportedModelError
from torch import Tensor

from hardpoint_runtime.loading.weights import Weights

DEVIATION = 0.02


class RandomWeights(Weights):
    """Normal numbers for matrices, ones for norms, no biases; each tensor depends on the seed and
    its name.
    """

    def __init__(self, description: ModelDescription, seed: int = 0) -> None:
        if description.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{description.path}: load_format dummy knows no {description.architecture}; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        self._seed = seed
        self.shapes = expected_shapes(description)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Make one tensor."""
        shape = self.shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        numbers = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        values = numbers.standard_normal(shape, dtype=np.float32)
        values *= DEVIATION
        return torch.from_numpy(values).to(dtype)

    def close(self) -> None:
        """Nothing is open."""
