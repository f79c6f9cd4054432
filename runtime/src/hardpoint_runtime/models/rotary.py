"""Rotary position angles, made once a step for all layers of one rule."""

from __future__ import annotations

import math

import torch
from hardpoint.checkpoints.rotary import RotaryConfig


class Rotary(torch.nn.Module):
    """Makes the angles of a step. Holds no tensor that a checkpoint knows. ``longest``: tokens that
    a request may have.
    """

    def __init__(self, config: RotaryConfig, longest: int) -> None:
        super().__init__()
        self.config = config
        self.longest = longest
        self._frequencies: torch.Tensor | None = None

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) float32 [T, 1, size] for ``positions`` [T], in the form that the
        operation ``rotary`` takes.
        """
        if self._frequencies is None:
            self._frequencies = frequencies(self.config, self.longest).to(positions.device)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.config.magnitude != 1.0:
            cos, sin = cos * self.config.magnitude, sin * self.config.magnitude
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def frequencies(config: RotaryConfig, longest: int) -> torch.Tensor:
    """Return how far each pair turns from one position to the next: float32 [size / 2], on the
    host, in radians. Formulas: :class:`hardpoint.checkpoints.rotary.RotaryConfig`.
    """
    steps = torch.arange(0, config.size, 2, dtype=torch.int64, device="cpu").float() / config.size
    plain = 1.0 / config.theta**steps
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _blended_by_length(plain, config)
    if config.kind == "yarn":
        return _blended_by_turns(plain, config)
    if config.kind == "longrope":
        is_long = longest > config.original_length
        factors = config.long_factors if is_long else config.short_factors
        return plain / torch.tensor(factors, device="cpu")
    return plain


def _blended_by_length(plain: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    turns = config.original_length * plain / (2 * math.pi)
    low, high = config.low_frequency, config.high_frequency
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / config.factor * (1 - kept)


def _blended_by_turns(plain: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    def pair_of(turns: float) -> float:
        full = math.log(config.original_length / (turns * 2 * math.pi))
        return config.size * full / (2 * math.log(config.theta))

    first, last = pair_of(config.fast), pair_of(config.slow)
    if config.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.size - 1)
    pairs = torch.arange(config.size // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain * kept + plain / config.factor * (1 - kept)
