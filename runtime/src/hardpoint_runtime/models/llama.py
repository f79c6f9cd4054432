"""Decoders of the Llama architecture, by configuration: grouped-query attention with rotary
positions, RMS norm before each half of a layer, a gated SiLU MLP.

A layer keeps (x, residual) apart, so that each norm adds and normalises in one operation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import UnsupportedError
from hardpoint.kv_cache import KVCacheSpec
from torch import nn

from hardpoint_runtime import forward_context
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.language_model import LanguageModel
from hardpoint_runtime.models.layers import Embedding, Norm, Projection, Slot, merged, whole
from hardpoint_runtime.models.rotary import Rotary, rotary_shape
from hardpoint_runtime.operations import Operations

Angles = tuple[torch.Tensor, torch.Tensor]


class LlamaAttention(nn.Module):
    """Self-attention of one layer. ``name`` is its key in the step's metadata and caches."""

    def __init__(self, name: str, description: ModelDescription, operations: Operations) -> None:
        super().__init__()
        self.name = name
        self.heads = description.num_heads
        self.kv_heads = description.num_kv_heads
        self.head = description.head_size
        self.scale = self.head**-0.5
        bias = bool(description.hf_config.get("attention_bias", False))
        rows = {
            "q_proj": self.heads * self.head,
            "k_proj": self.kv_heads * self.head,
            "v_proj": self.kv_heads * self.head,
        }
        self.qkv = Projection(description.hidden_size, rows, bias=bias, operations=operations)
        self.out = Projection(
            rows["q_proj"], {"o_proj": description.hidden_size}, bias=bias, operations=operations
        )
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
        turned = self.heads + self.kv_heads
        qkv = self.qkv(x).view(-1, turned + self.kv_heads, self.head)
        query_key = operations.rotary(qkv[:, :turned], *angles)
        operations.kv_write(
            query_key[:, self.heads :], qkv[:, turned:], cache.key, cache.value, metadata
        )
        attended = operations.attention(
            query_key[:, : self.heads], cache.key, cache.value, metadata, scale=self.scale
        )
        attended = attended.reshape(-1, self.heads * self.head)
        out: torch.Tensor = self.out(attended if rows is None else attended.index_select(0, rows))
        return out

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        return {**self.qkv.slots(prefix), **self.out.slots(prefix)}


class LlamaMLP(nn.Module):
    """The gated MLP of one layer."""

    def __init__(self, description: ModelDescription, operations: Operations) -> None:
        super().__init__()
        hidden, inner = description.hidden_size, description.intermediate_size
        bias = bool(description.hf_config.get("mlp_bias", False))
        self.gate_up = Projection(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, operations=operations
        )
        self.down = Projection(inner, {"down_proj": hidden}, bias=bias, operations=operations)
        self._operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        out: torch.Tensor = self.down(self._operations.silu_and_mul(self.gate_up(x)))
        return out

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        return {**self.gate_up.slots(prefix), **self.down.slots(prefix)}


class LlamaLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, index: int, description: ModelDescription, operations: Operations) -> None:
        super().__init__()
        self.prefix = f"model.layers.{index}."
        eps = _eps(description)
        self.input_norm = Norm(description.hidden_size, eps)
        self.attention = LlamaAttention(f"{self.prefix}self_attn", description, operations)
        self.inner_norm = Norm(description.hidden_size, eps)
        self.mlp = LlamaMLP(description, operations)
        self._operations = operations

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Angles,
        step: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (this layer's last output, the residual stream without it), of ``rows`` only where
        they are given.
        """
        norm, add_norm = self._operations.rms_norm, self._operations.add_rms_norm
        before = self.input_norm
        if residual is None:
            x, residual = norm(x, before.weight, before.eps), x
        else:
            x, residual = add_norm(x, residual, before.weight, before.eps)
        x = self.attention(x, angles, step, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        x, residual = add_norm(x, residual, self.inner_norm.weight, self.inner_norm.eps)
        return self.mlp(x), residual

    def slots(self) -> dict[str, Slot]:
        """Return the checkpoint's names of this layer."""
        return merged(
            [
                self.input_norm.slots(f"{self.prefix}input_layernorm"),
                self.attention.slots(f"{self.prefix}self_attn."),
                self.inner_norm.slots(f"{self.prefix}post_attention_layernorm"),
                self.mlp.slots(f"{self.prefix}mlp."),
            ]
        )


class LlamaForCausalLM(LanguageModel):
    """The whole decoder with its output projection, tied to the embeddings or not."""

    def __init__(self, description: ModelDescription, operations: Operations) -> None:
        super().__init__(description, operations)
        _check(description)
        self.embed = Embedding(description.vocab_size, description.hidden_size)
        self.layers = nn.ModuleList(
            LlamaLayer(index, description, operations) for index in range(description.num_layers)
        )
        self.norm = Norm(description.hidden_size, _eps(description))
        self.tied = bool(description.hf_config.get("tie_word_embeddings", False))
        self.head = self.embed if self.tied else Embedding(*self.embed.weight.shape)
        self.rotary = Rotary(rotary_shape(description.hf_config, description.head_size))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states; see :class:`LanguageModel`. The last layer computes what follows
        its attention for ``rows`` alone.
        """
        step = forward_context.current() if step is None else step
        angles = self.rotary(positions)
        x = self.operations.embedding(token_ids, self.embed.weight)
        residual: torch.Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            step.raise_if_cancelled()
            x, residual = layer(x, residual, angles, step, rows if index == last else None)
        if residual is None:
            return self.operations.rms_norm(x, self.norm.weight, self.norm.eps)
        return self.operations.add_rms_norm(x, residual, self.norm.weight, self.norm.eps)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits; see :class:`LanguageModel`."""
        return self.operations.linear(hidden, self.head.weight, None).float()

    def kv_cache_spec(self, block_size: int, dtype: str) -> Mapping[str, KVCacheSpec]:
        """One full-attention spec for all layers."""
        spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=self.description.num_kv_heads,
            head_size_k=self.description.head_size,
            head_size_v=self.description.head_size,
            dtype=dtype,
        )
        return {layer.attention.name: spec for layer in self._layers()}

    def weight_slots(self) -> Mapping[str, Slot]:
        """Return the checkpoint's names and where they go."""
        outside = {"model.embed_tokens.weight": whole(self.embed)}
        if not self.tied:
            outside["lm_head.weight"] = whole(self.head)
        layers = [layer.slots() for layer in self._layers()]
        return merged([outside, *layers, self.norm.slots("model.norm")])

    def is_ignorable(self, name: str) -> bool:
        """A tied model needs no output projection of its own."""
        return super().is_ignorable(name) or (self.tied and name == "lm_head.weight")

    def _layers(self) -> list[LlamaLayer]:
        return [layer for layer in self.layers if isinstance(layer, LlamaLayer)]


def _eps(description: ModelDescription) -> float:
    return float(str(description.hf_config.get("rms_norm_eps", 1e-6)))


def _check(description: ModelDescription) -> None:
    activation = description.hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(f"the activation {activation!r}", "the built-in Llama model")
    if description.num_heads % description.num_kv_heads:
        raise UnsupportedError(
            f"{description.num_heads} query heads over {description.num_kv_heads} key heads",
            "the built-in Llama model",
            reason="the first must be a multiple of the second",
        )
