"""``generate`` of transformers, eager torch."""

from __future__ import annotations

import importlib
from typing import Any


class Engine:
    """A batch is one tensor: all prompts are of one length."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        self._model = library.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(self._torch, dtype)
        )
        self.vocab_size = int(self._model.config.vocab_size)

    def run(self, prompts: list[list[int]], new: int) -> int:
        """See ``serving_turns.Engine``."""
        ids = self._torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        return int((out.shape[1] - ids.shape[1]) * ids.shape[0])

    def figures(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """End with the process."""
