"""One layer of a decoder: attention over the paged cache, then an MLP or a mixture of experts.

A layer keeps (x, residual) apart, so that each norm adds and normalises in one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hardpoint.checkpoints.decoder import DecoderConfig
from hardpoint.checkpoints.decoder_tensors import LAYERS, norm_names
from hardpoint.checkpoints.description import ModelDescription
from torch import nn

from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.experts import Experts
from hardpoint_runtime.models.layers import Norm, Projection, Slot, merged
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import Seat

Angles = tuple[torch.Tensor, torch.Tensor]


class DecoderAttention(nn.Module):
    """Self-attention of one layer. ``name`` is its key in the step's metadata and caches."""

    def __init__(
        self,
        index: int,
        description: ModelDescription,
        config: DecoderConfig,
        operations: Operations,
        seat: Seat,
    ) -> None:
        super().__init__()
        heads = seat.heads(description)
        hidden = description.hidden_size
        self.name = f"{LAYERS}{index}.self_attn"
        self.heads = heads.query.size
        self.kv_heads = heads.kv.size
        self.head = description.head_size
        self.turned = config.rotaries[config.layers[index].rotary].size
        self.options = _options(index, config)
        query, kv = heads.query.times(self.head), heads.kv.times(self.head)
        rows = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv = Projection(
            hidden,
            rows,
            bias=config.qkv_bias,
            operations=operations,
            packed="qkv_proj" if config.packed else None,
        )
        self.out = Projection(
            query,
            {"o_proj": hidden},
            bias=config.out_bias,
            operations=operations,
            group=seat.tensor,
        )
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if config.query_key_norm:
            self.query_norm = Norm(self.head, config.norm_eps, config.norm_offset)
            self.key_norm = Norm(self.head, config.norm_eps, config.norm_offset)
        self._operations = operations

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        step: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, H] of ``x`` [T, H], or [m, H] of its ``rows`` [m]; writes this step's keys and
        values to the cache.
        """
        operations, cache, metadata = (
            self._operations,
            step.kv_caches[self.name],
            step.attention[self.name],
        )
        both = self.heads + self.kv_heads
        qkv = self.qkv(x).view(-1, both + self.kv_heads, self.head)
        query_key = self._turned(self._normed(qkv[:, :both]), angles)
        operations.kv_write(
            query_key[:, self.heads :], qkv[:, both:], cache.key, cache.value, metadata
        )
        attended = operations.attention(
            query_key[:, : self.heads], cache.key, cache.value, metadata, **self.options
        )
        attended = attended.reshape(-1, self.heads * self.head)
        out: torch.Tensor = self.out(attended if rows is None else attended.index_select(0, rows))
        return out

    def _normed(self, query_key: torch.Tensor) -> torch.Tensor:
        if self.query_norm is None or self.key_norm is None:
            return query_key
        parts = query_key[:, : self.heads], query_key[:, self.heads :]
        norm, norms = self._operations.rms_norm, (self.query_norm, self.key_norm)
        return torch.cat(
            [norm(x, own.weight, own.eps) for x, own in zip(parts, norms, strict=True)], 1
        )

    def _turned(self, query_key: torch.Tensor, angles: Angles) -> torch.Tensor:
        if self.turned == self.head:
            return self._operations.rotary(query_key, *angles)
        front = self._operations.rotary(query_key[..., : self.turned], *angles)
        return torch.cat((front, query_key[..., self.turned :]), -1)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        found = {**self.qkv.slots(prefix), **self.out.slots(prefix)}
        if self.query_norm is not None and self.key_norm is not None:
            found.update(self.query_norm.slots(f"{prefix}q_norm"))
            found.update(self.key_norm.slots(f"{prefix}k_norm"))
        return found


def _options(index: int, config: DecoderConfig) -> Mapping[str, Any]:
    """Return the keywords of the operation ``attention`` in a layer, those that it needs."""
    options: dict[str, Any] = {"scale": config.query_scale}
    if (window := config.layers[index].window) is not None:
        options["window"] = window
    if config.attention_cap is not None:
        options["softcap"] = config.attention_cap
    return options


class DecoderMLP(nn.Module):
    """The gated MLP of one layer."""

    def __init__(
        self,
        description: ModelDescription,
        config: DecoderConfig,
        activate: Callable[[torch.Tensor], torch.Tensor],
        operations: Operations,
        seat: Seat,
    ) -> None:
        super().__init__()
        hidden, inner = description.hidden_size, seat.share(description.intermediate_size)
        self.gate_up = Projection(
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            operations=operations,
            packed="gate_up_proj" if config.packed else None,
        )
        self.down = Projection(
            inner,
            {"down_proj": hidden},
            bias=config.mlp_bias,
            operations=operations,
            group=seat.tensor,
        )
        self._activate = activate

    def forward(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        out: torch.Tensor = self.down(self._activate(self.gate_up(x)))
        return out

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``, the layer's."""
        return {**self.gate_up.slots(f"{prefix}mlp."), **self.down.slots(f"{prefix}mlp.")}


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(
        self,
        index: int,
        description: ModelDescription,
        config: DecoderConfig,
        operations: Operations,
        seat: Seat,
    ) -> None:
        super().__init__()
        self.prefix = f"{LAYERS}{index}."
        self.rotary = config.layers[index].rotary
        norms = [
            Norm(description.hidden_size, config.norm_eps, config.norm_offset)
            for _ in norm_names(config)
        ]
        self.norm_names = norm_names(config)
        self.input_norm, self.inner_norm = norms[:2]
        self.attention = DecoderAttention(index, description, config, operations, seat)
        activate = getattr(operations, f"{config.activation}_and_mul")
        self.mlp: DecoderMLP | Experts
        if config.layers[index].sparse and config.experts is not None:
            hidden = description.hidden_size
            self.mlp = Experts(hidden, config.experts, activate, operations, seat)
        else:
            self.mlp = DecoderMLP(description, config, activate, operations, seat)
        self.attention_norm, self.mlp_norm = norms[2:] or (None, None)
        self._operations = operations

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Sequence[Angles],
        step: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (this layer's last output, the residual stream without it), of ``rows`` only where
        they are given. ``angles`` are of each rotary rule.
        """
        norm, add_norm = self._operations.rms_norm, self._operations.add_rms_norm
        before = self.input_norm
        if residual is None:
            x, residual = norm(x, before.weight, before.eps), x
        else:
            x, residual = add_norm(x, residual, before.weight, before.eps)
        x = self.attention(x, angles[self.rotary], step, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        if self.attention_norm is not None:
            x = norm(x, self.attention_norm.weight, self.attention_norm.eps)
        x, residual = add_norm(x, residual, self.inner_norm.weight, self.inner_norm.eps)
        x = self.mlp(x, step)
        if self.mlp_norm is not None:
            x = norm(x, self.mlp_norm.weight, self.mlp_norm.eps)
        return x, residual

    def slots(self) -> dict[str, Slot]:
        """Return the checkpoint's names of this layer."""
        norms = (self.input_norm, self.inner_norm, self.attention_norm, self.mlp_norm)
        return merged(
            [
                *(
                    norm.slots(f"{self.prefix}{name}")
                    for name, norm in zip(self.norm_names, norms, strict=False)
                    if norm is not None
                ),
                self.attention.slots(f"{self.prefix}self_attn."),
                self.mlp.slots(self.prefix),
            ]
        )
