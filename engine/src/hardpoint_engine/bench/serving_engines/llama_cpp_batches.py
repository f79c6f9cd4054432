"""llama.cpp through its Python bindings: batches of sequences in one context, greedy."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any


class Engine:
    """Its own sampler chooses; every token is turned to text, as the others do."""

    MOST = 64

    def __init__(self, model: str, threads: int) -> None:
        cpp: Any = importlib.import_module("llama_cpp")
        self._cpp = cpp
        cpp.llama_backend_init()
        self._quiet = cpp.llama_log_callback(lambda *_: None)
        cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        self._model = cpp.llama_model_load_from_file(
            model.encode(), cpp.llama_model_default_params()
        )
        params = cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.MOST * 48, 2048, 512
        params.n_seq_max, params.kv_unified = self.MOST, True
        params.n_threads = params.n_threads_batch = threads
        self._context = cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"no context for {model}")
        self._vocab = cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(cpp.llama_vocab_n_tokens(self._vocab))
        self._batch = cpp.llama_batch_init(2048, 0, 1)
        self._chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
        cpp.llama_sampler_chain_add(self._chain, cpp.llama_sampler_init_greedy())
        self._text = ctypes.create_string_buffer(256)

    def run(self, prompts: list[list[int]], new: int) -> int:
        """See ``serving_turns.Engine``."""
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self._context), False)
        # Prompts of a batch go in together as far as the batch has room.
        last: list[int] = []
        room: list[tuple[int, int, int, bool]] = []
        for sequence, prompt in enumerate(prompts):
            if len(room) + len(prompt) > 2048:
                last += self._decode(room)
                room = []
            end = len(prompt) - 1
            room += [(token, at, sequence, at == end) for at, token in enumerate(prompt)]
        last += self._decode(room)
        made = len(last)
        for step in range(1, new):
            at = len(prompts[0]) + step - 1
            last = self._decode([(token, at, row, True) for row, token in enumerate(last)])
            made += len(last)
        return made

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, wanted) each; return the choices of those wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        if self._cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"a step of {len(tokens)} tokens failed")
        chosen = []
        for index, each in enumerate(tokens):
            if each[3]:
                token = self._cpp.llama_sampler_sample(self._chain, self._context, index)
                self._cpp.llama_token_to_piece(self._vocab, token, self._text, 256, 0, True)
                chosen.append(token)
        return chosen

    def figures(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Give the memory back."""
        self._cpp.llama_batch_free(self._batch)
        self._cpp.llama_free(self._context)
        self._cpp.llama_model_free(self._model)
