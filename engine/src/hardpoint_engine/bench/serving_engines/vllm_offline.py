"""vLLM's offline ``LLM``, in one process, on the host's processors."""

from __future__ import annotations

import importlib
import os
from typing import Any

BLOCK = 128
BLOCKS = 96
"""Of the KV cache: 64 sequences take one each, the longest that is allowed, 2048 tokens, takes 16.
"""


class Engine:
    """``eager``: without its compiler."""

    def __init__(self, model: str, threads: int, dtype: str, eager: bool) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        vllm: Any = importlib.import_module("vllm")
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=2048,
            max_num_seqs=64,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.vocab_size = self._llm.llm_engine.model_config.get_vocab_size()

    def run(self, prompts: list[list[int]], new: int) -> int:
        """See ``serving_turns.Engine``."""
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True
        )
        given = [{"prompt_token_ids": each} for each in prompts]
        found = self._llm.generate(given, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    def figures(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """End with the process."""
