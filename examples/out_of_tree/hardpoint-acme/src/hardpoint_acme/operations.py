"""Kernels of the device. Here they are torch; a vendor's would call its own library."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich,
    2019), computed in float32, in the type of ``x``.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
