"""The LanguageModel contract: what the runner and the weight loader need of a model.

Built in the worker by :func:`hardpoint_runtime.models.build_model`. A plugin's own architecture
(hook ``hardpoint_models``) is a subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import CheckpointError
from hardpoint.kv_cache import KVCacheSpec
from torch import nn

from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.layers import Filling, Slot
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import ALONE, Seat

Carried = Mapping[str, torch.Tensor]
"""What a pipeline stage hands to the next, by name."""


class LanguageModel(nn.Module):
    """A decoder, or one rank's part of it: as much as its seat has. Constructed on torch's meta
    device; its tensors get memory afterwards.

    Tokens of all requests come as one flat list: T tokens, H hidden size, V vocabulary.
    """

    can_split: ClassVar[bool] = False
    """Whether this class takes a ``seat`` and builds a rank's part; else it is only ever whole, and
    is built without one.
    """

    def __init__(
        self, description: ModelDescription, operations: Operations, *, seat: Seat = ALONE
    ) -> None:
        super().__init__()
        self.description = description
        self.operations = operations
        self.seat = seat

    @classmethod
    def attention_needs(cls, description: ModelDescription) -> Mapping[str, object]:
        """Return which options a model of this description may give to the operation ``attention``:
        ``window`` and ``softcap``, true or false. Asked before operations are resolved.
        """
        return {"window": True, "softcap": True}

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext | None = None,
        rows: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """Return the hidden states [T, H] of ``token_ids`` [T] at ``positions`` [T], both int64 on
        the model's device, after the last norm; with ``rows`` [m], int64, only theirs: [m, H].

        A pipeline stage but the first starts from what the one before ``carried``, and may change
        it; one but the last returns that of all rows for the next. Keys and values are written to
        the step's caches. ``step`` unset: the entered forward context. Raises CancelledStepError
        between layers if the step was cancelled.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, V] of hidden states [n, H]; on the last pipeline stage."""

    @abstractmethod
    def kv_cache_spec(self, block_size: int, dtype: str) -> Mapping[str, KVCacheSpec]:
        """Return attention layer's name -> what it keeps per block, in the order of the layers."""

    @abstractmethod
    def weight_slots(self) -> Mapping[str, Slot]:
        """Return checkpoint name (Hugging Face) -> the piece of a parameter that it fills.

        Exactly these weights must be loaded. The dictionary is made anew at each call.
        """

    def carried_shapes(self, num_tokens: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of what a stage hands to the next for T tokens."""
        shape = (num_tokens, self.description.hidden_size)
        return {"hidden_states": shape, "residual": shape}

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the checkpoint names that must be loaded, with their shapes. For loaders."""
        return {name: slot.shape for name, slot in self.weight_slots().items()}

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may bring this weight although the model, or this rank's part of
        it, has no use for it.
        """
        return name.endswith(".rotary_emb.inv_freq")

    def load_weight(self, name: str, tensor: Filling) -> None:
        """Copy one weight of the checkpoint, a host tensor of any float dtype, to where it belongs.
        Rows as they are stored are for what is held packed.

        Raises CheckpointError naming the weight if it is unknown or has another shape.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise CheckpointError(
                f"weight {name!r} is none of {type(self).__name__} as its configuration describes"
            )
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(
                f"weight {name!r} has shape {tuple(tensor.shape)}; the model's configuration "
                f"needs {slot.shape}"
            )
        slot.fill(tensor)

    def materialise(self, device: torch.device, dtype: torch.dtype) -> None:
        """Give every parameter uninitialised memory on ``device``, of ``dtype`` unless its module
        has a ``weight_dtype``. Called once, before loading.
        """
        replaced: dict[int, nn.Parameter] = {}
        for module in self.modules():
            own = getattr(module, "weight_dtype", None) or dtype
            for name, old in list(module.named_parameters(recurse=False)):
                if id(old) not in replaced:
                    empty = torch.empty(old.shape, dtype=own, device=device)
                    replaced[id(old)] = nn.Parameter(empty, requires_grad=False)
                module.register_parameter(name, replaced[id(old)])
        self._slots = dict(self.weight_slots())
