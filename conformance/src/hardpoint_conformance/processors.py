"""Logits processors of the kit. They import no array library: the logits bring their methods."""

from __future__ import annotations

from typing import Any

from hardpoint.logits_processor import LogitsProcessor, SampledRows


class EvenOnly(LogitsProcessor):
    """Forbids odd token ids."""

    def apply(self, logits: Any, rows: SampledRows) -> None:
        """Set every other logit to minus infinity."""
        logits[:, 1::2] = -float("inf")
