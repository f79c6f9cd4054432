"""Decoders of the Llama architecture, by configuration: grouped-query attention with rotary
positions, RMS norm before each half of a layer, a gated SiLU MLP.

A layer keeps (x, residual) apart, so that each norm adds and normalises in one operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheSpec
from torch import nn

from hardpoint_runtime import forward_context
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.language_model import Carried, LanguageModel
from hardpoint_runtime.models.layers import Embedding, Norm, Projection, Slot, merged
from hardpoint_runtime.models.rotary import Rotary, rotary_shape
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import ALONE, Seat

EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
LAYERS = "model.layers."
"""Names in checkpoints."""

Angles = tuple[torch.Tensor, torch.Tensor]


class LlamaAttention(nn.Module):
    """Self-attention of one layer. ``name`` is its key in the step's metadata and caches."""

    def __init__(
        self, name: str, description: ModelDescription, operations: Operations, seat: Seat
    ) -> None:
        super().__init__()
        heads = seat.heads(description)
        hidden = description.hidden_size
        self.name = name
        self.heads = heads.query.size
        self.kv_heads = heads.kv.size
        self.head = description.head_size
        self.scale = self.head**-0.5
        bias = bool(description.hf_config.get("attention_bias", False))
        query, kv = heads.query.times(self.head), heads.kv.times(self.head)
        rows = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv = Projection(hidden, rows, bias=bias, operations=operations)
        self.out = Projection(
            query, {"o_proj": hidden}, bias=bias, operations=operations, group=seat.tensor
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

    def __init__(self, description: ModelDescription, operations: Operations, seat: Seat) -> None:
        super().__init__()
        hidden, inner = description.hidden_size, seat.share(description.intermediate_size)
        bias = bool(description.hf_config.get("mlp_bias", False))
        self.gate_up = Projection(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, operations=operations
        )
        self.down = Projection(
            inner, {"down_proj": hidden}, bias=bias, operations=operations, group=seat.tensor
        )
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

    def __init__(
        self, index: int, description: ModelDescription, operations: Operations, seat: Seat
    ) -> None:
        super().__init__()
        self.prefix = f"{LAYERS}{index}."
        eps = _eps(description)
        self.input_norm = Norm(description.hidden_size, eps)
        self.attention = LlamaAttention(f"{self.prefix}self_attn", description, operations, seat)
        self.inner_norm = Norm(description.hidden_size, eps)
        self.mlp = LlamaMLP(description, operations, seat)
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
    """The decoder with its output projection, tied to the embeddings or not; a pipeline stage of
    it has consecutive layers, the first stage the embedding, the last one norm and projection.
    """

    can_split: ClassVar[bool] = True

    def __init__(
        self, description: ModelDescription, operations: Operations, *, seat: Seat = ALONE
    ) -> None:
        super().__init__(description, operations, seat=seat)
        _check(description)
        self.tied = bool(description.hf_config.get("tie_word_embeddings", False))
        self.span = seat.layers(description)
        self.embed = self._embedding() if seat.is_first_stage else None
        self.layers = nn.ModuleList(
            LlamaLayer(index, description, operations, seat) for index in self.span.range
        )
        self.norm: Norm | None = None
        self.head: Embedding | None = None
        if seat.is_last_stage:
            self.norm = Norm(description.hidden_size, _eps(description))
            self.head = self.embed if self.tied and self.embed else self._embedding()
        self.rotary = Rotary(rotary_shape(description.hf_config, description.head_size))

    def _embedding(self) -> Embedding:
        description, seat = self.description, self.seat
        return Embedding(
            seat.shares(description.vocab_size),
            description.hidden_size,
            index=seat.place.tensor,
            group=seat.tensor,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext | None = None,
        rows: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """Return hidden states; see :class:`LanguageModel`. The last layer computes what follows
        its attention for ``rows`` alone.
        """
        step = forward_context.current() if step is None else step
        angles = self.rotary(positions)
        residual: torch.Tensor | None = None
        if self.embed is not None:
            x = self.embed.look_up(token_ids, self.operations)
        elif carried is not None:
            x, residual = carried["hidden_states"], carried["residual"]
        else:
            raise LifecycleError("a pipeline stage but the first needs what the one before carried")
        last = None if self.norm is None else len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            step.raise_if_cancelled()
            x, residual = layer(x, residual, angles, step, rows if index == last else None)
        if residual is None:
            residual = torch.zeros_like(x)  # a model without layers
        if self.norm is None:
            return {"hidden_states": x, "residual": residual}
        return self.operations.add_rms_norm(x, residual, self.norm.weight, self.norm.eps)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits; see :class:`LanguageModel`."""
        if self.head is None:
            raise LifecycleError("only the last pipeline stage has logits")
        return self.head.logits(hidden, self.operations)

    def kv_cache_spec(self, block_size: int, dtype: str) -> Mapping[str, KVCacheSpec]:
        """One full-attention spec for all layers of this stage, with the heads of this shard."""
        spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=self.seat.heads(self.description).kv.size,
            head_size_k=self.description.head_size,
            head_size_v=self.description.head_size,
            dtype=dtype,
        )
        return {layer.attention.name: spec for layer in self._layers()}

    def weight_slots(self) -> Mapping[str, Slot]:
        """Return the checkpoint's names and where they go."""
        found = [layer.slots() for layer in self._layers()]
        if self.embed is not None:
            found.insert(0, self.embed.slots(EMBEDDING))
        if self.head is not None and self.head is not self.embed:
            found.append(self.head.slots(EMBEDDING if self.tied else HEAD))
        if self.norm is not None:
            found.append(self.norm.slots(NORM))
        return merged(found)

    def is_ignorable(self, name: str) -> bool:
        """A tied model needs no output projection of its own, a stage nothing of the others."""
        return (
            super().is_ignorable(name)
            or (self.tied and name == f"{HEAD}.weight")
            or self._is_elsewhere(name)
        )

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another pipeline stage has this weight."""
        if name in (f"{EMBEDDING}.weight", f"{HEAD}.weight", f"{NORM}.weight"):
            return True  # on the first stage or on the last, which miss it if it is not there
        index, _, _ = name.removeprefix(LAYERS).partition(".")
        known = name.startswith(LAYERS) and index.isdecimal()
        return known and int(index) < self.span.total and int(index) not in self.span.range

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
