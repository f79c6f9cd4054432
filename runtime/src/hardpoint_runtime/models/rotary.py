"""Rotary position angles, made once a step for all layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from hardpoint.errors import UnsupportedError


@frozen(kw_only=True)
class RotaryShape:
    """Head size in elements and the base of the angles: pair i turns by ``position / theta ** (2 *
    i / head_size)`` (Su et al., 2021).
    """

    head_size: int
    theta: float


def rotary_shape(hf_config: Mapping[str, object], head_size: int) -> RotaryShape:
    """Read ``rope_theta`` or ``rope_parameters``. Raises UnsupportedError for a scaling rule."""
    stated = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    parameters: Mapping[str, object] = stated if isinstance(stated, Mapping) else {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(
            f"rotary scaling {kind!r}", "the built-in Llama model", hint="Only 'default' is known."
        )
    theta = parameters.get("rope_theta") or hf_config.get("rope_theta") or 10_000.0
    return RotaryShape(head_size=head_size, theta=float(str(theta)))


class Rotary(torch.nn.Module):
    """Makes the angles of a step. Holds no tensor that a checkpoint knows."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        self.shape = shape
        self._frequencies: torch.Tensor | None = None

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) float32 [T, 1, head_size] for ``positions`` [T], in the form that the
        operation ``rotary`` takes.
        """
        if self._frequencies is None:
            self._frequencies = self._make(positions.device)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _make(self, device: torch.device) -> torch.Tensor:
        head = self.shape.head_size
        exponents = torch.arange(0, head, 2, dtype=torch.int64).float() / head
        return (1.0 / self.shape.theta**exponents).to(device)
