"""Decoders of every built-in architecture: one model, built from a configuration.

What an architecture is, is in :mod:`hardpoint.checkpoints.decoder_architectures`; a plugin makes
its own of a subclass that reads another one (:meth:`DecoderForCausalLM.read_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from hardpoint.checkpoints.decoder import DecoderConfig
from hardpoint.checkpoints.decoder_architectures import decoder_config
from hardpoint.checkpoints.decoder_tensors import EMBEDDING, HEAD, LAYERS, NORM
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import LifecycleError, UnsupportedError, UnsupportedModelError
from hardpoint.kv_cache import KVCacheSpec
from torch import nn

from hardpoint_runtime import forward_context
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.decoder_layers import DecoderLayer
from hardpoint_runtime.models.language_model import Carried, LanguageModel
from hardpoint_runtime.models.layers import Embedding, Norm, Slot, merged
from hardpoint_runtime.models.rotary import Rotary
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import ALONE, Seat


class DecoderForCausalLM(LanguageModel):
    """The decoder with its output projection, tied to the embeddings or not; a pipeline stage of
    it has consecutive layers, the first stage the embedding, the last one norm and projection.
    """

    can_split: ClassVar[bool] = True

    def __init__(
        self, description: ModelDescription, operations: Operations, *, seat: Seat = ALONE
    ) -> None:
        super().__init__(description, operations, seat=seat)
        self.config = config = self.read_config(description)
        _check(description)
        self.tied = config.tied
        self.span = seat.layers(description)
        self.embed = self._embedding() if seat.is_first_stage else None
        self.layers = nn.ModuleList(
            DecoderLayer(index, description, config, operations, seat) for index in self.span.range
        )
        self.norm: Norm | None = None
        self.head: Embedding | None = None
        if seat.is_last_stage:
            self.norm = Norm(description.hidden_size, config.norm_eps, config.norm_offset)
            self.head = self.embed if self.tied and self.embed else self._embedding()
        self.rotaries = nn.ModuleList(
            Rotary(rotary, description.context_length) for rotary in config.rotaries
        )
        self.embedding_scale = config.embedding_scale

    @classmethod
    def read_config(cls, description: ModelDescription) -> DecoderConfig:
        """Return what the described model is built from. Called once, by the constructor. Raises
        CheckpointError for a configuration that cannot be, or is not supported.
        """
        config = decoder_config(description)
        if config is None:
            raise UnsupportedModelError(
                f"{description.path}: {cls.__name__} knows no {description.architecture}"
            )
        return config

    @classmethod
    def attention_needs(cls, description: ModelDescription) -> Mapping[str, object]:
        """See :class:`LanguageModel`."""
        config = cls.read_config(description)
        return {
            "window": any(layer.window is not None for layer in config.layers),
            "softcap": config.attention_cap is not None,
        }

    def materialise(self, device: torch.device, dtype: torch.dtype) -> None:
        """See :class:`LanguageModel`. Embeddings are scaled by a number of their own type."""
        super().materialise(device, dtype)
        scale = torch.tensor(self.config.embedding_scale, dtype=dtype, device="cpu")
        self.embedding_scale = float(scale)

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
        angles = [rotary(positions) for rotary in self.rotaries]
        residual: torch.Tensor | None = None
        if self.embed is not None:
            x = self.embed.look_up(token_ids, self.operations)
            x = x if self.embedding_scale == 1.0 else x * self.embedding_scale
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
        logits = self.head.logits(hidden, self.operations)
        cap = self.config.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def kv_cache_spec(self, block_size: int, dtype: str) -> Mapping[str, KVCacheSpec]:
        """One full-attention spec for all layers of this stage, with the heads of this shard.

        Layers that see a window keep everything too: a block table serves all layers.
        """
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

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _check(description: ModelDescription) -> None:
    if description.num_heads % description.num_kv_heads:
        raise UnsupportedError(
            f"{description.num_heads} query heads over {description.num_kv_heads} key heads",
            "the built-in decoder",
            reason="the first must be a multiple of the second",
        )
