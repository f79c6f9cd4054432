"""The seam between the ModelRunner suite and what it compares with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest


class Oracle(ABC):
    """Computes the logits of the model under test by other means than the plugin."""

    name: str
    """What the certificate says was compared with."""

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> Any:
        """Return the logits after each of ``tokens``: float64 numpy array, (tokens, vocabulary)."""

    def adapted(self, adapter: LoRARequest) -> Oracle | None:
        """Return what computes the same model with a LoRA adapter (``adapter.path`` is its folder,
        in the layout of PEFT); None where there is nothing to compare with, which the certificate
        then says.
        """
        return None

    def states(self, tokens: Sequence[int]) -> Any:
        """Return the final hidden states, after the last norm: float64 numpy array, (tokens, hidden
        size); None where the model has none to compare.
        """
        return None
