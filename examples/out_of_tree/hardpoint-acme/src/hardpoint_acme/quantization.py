"""``acme8``: a byte for each weight of a linear layer, and a scale for each of its outputs.

The toolkit has no consumer of ``hardpoint_quantizations`` yet; this plugin's runner takes its own
offer up, by the key ``plugins.acme.quantization``, through ``make_model``, ``load_weights`` and
``make_operations``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit
from hardpoint_runtime.models.layers import Projection
from torch import nn

LARGEST = 127


class ByteRows:
    """The method: :meth:`create` before the weights are there, :meth:`after_load` when they are,
    :meth:`apply` in every step.
    """

    def __init__(self) -> None:
        self._layers: list[Projection] = []
        self._scales: dict[nn.Parameter, torch.Tensor] = {}

    def create(self, model: nn.Module) -> None:
        """Note the linear layers of ``model``."""
        self._layers = [each for each in model.modules() if isinstance(each, Projection)]

    def after_load(self) -> None:
        """Keep the layers' weights [N, K] as bytes; the floats go."""
        for layer in self._layers:
            weight = layer.weight
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
            packed = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
            layer.weight = packed
            self._scales[packed] = scale

    def apply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``x`` [T, K] times the weight [N, K] transposed, plus ``bias`` [N]: [T, N]."""
        scale = self._scales.get(weight)  # type: ignore[call-overload]
        if scale is None:  # the embedding, used as output projection
            return F.linear(x, weight, bias)
        return F.linear(x, weight.to(x.dtype) * scale.to(x.dtype), bias)
