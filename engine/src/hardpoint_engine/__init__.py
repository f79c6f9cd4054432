"""The reference driver: scheduler, KV blocks, tokenizer, LLM. Importing it imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.pooling_params import PoolingParams
    from hardpoint.sampling_params import SamplingParams

    from hardpoint_engine.async_llm import AsyncLLM
    from hardpoint_engine.llm import LLM
    from hardpoint_engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from hardpoint_engine.scheduling.admission import (
        AdmissionPolicy,
        Admit,
        Decision,
        Refuse,
        RequestInfo,
        RunningRequests,
        Wait,
    )

API = (1, 0)
"""The number of this distribution's own promises: LLM, its outputs, admission policies."""

__version__ = "0.1.0"

__all__ = [
    "API",
    "LLM",
    "AdmissionPolicy",
    "Admit",
    "AsyncLLM",
    "CompletionOutput",
    "Decision",
    "EmbeddingOutput",
    "PoolingParams",
    "Refuse",
    "RequestInfo",
    "RequestOutput",
    "RunningRequests",
    "SamplingParams",
    "Wait",
]

_ADMISSION = "hardpoint_engine.scheduling.admission"

_HOMES = {
    "AsyncLLM": "hardpoint_engine.async_llm",
    "LLM": "hardpoint_engine.llm",
    **dict.fromkeys(("AdmissionPolicy", "Admit", "Decision", "Refuse"), _ADMISSION),
    **dict.fromkeys(("RequestInfo", "RunningRequests", "Wait"), _ADMISSION),
    "CompletionOutput": "hardpoint_engine.outputs",
    "EmbeddingOutput": "hardpoint_engine.outputs",
    "PoolingParams": "hardpoint.pooling_params",
    "RequestOutput": "hardpoint_engine.outputs",
    "SamplingParams": "hardpoint.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used: commands must start light."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """Return all names, those that are imported when they are first used among them."""
    return sorted({*globals(), *__all__})
