"""Weights of a loader that knows no torch."""

from __future__ import annotations

import torch
from hardpoint.checkpoints.weight_source import WeightSource
from torch import Tensor

from hardpoint_runtime.loading.weights import Weights


class SourceWeights(Weights):
    """The arrays of ``source`` as tensors, over the same memory where the type stays."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.shapes = source.shapes

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor."""
        return torch.from_dlpack(self._source.read(name)).to(dtype)

    def close(self) -> None:
        """Close the source."""
        self._source.close()
