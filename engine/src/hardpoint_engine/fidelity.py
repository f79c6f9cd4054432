"""How far a model as it is configured is from the same model in float32: measured on a fixed text.

Called by ``hardpoint doctor --fidelity``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hardpoint.config import Config
from hardpoint.config.keys import replace
from hardpoint.errors import UnsupportedError
from hardpoint.references import resolve
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_platform

from hardpoint_engine.llm import LLM

TEXT: Final = """\
The harbour was quiet when the survey boat came back. Two of the crew carried the instruments up
the stone steps, and the third, a geologist from Lisbon, stayed on board to finish her notes:
depth 41.7 m, salinity 35.2, three samples of sand and one of clay. "If the current keeps its
direction," she wrote, "the channel will have moved by the spring." That evening they compared the
chart of 1968 with the new one. Most of the reef was where it had always been; the northern edge,
however, was missing.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

What is the largest planet of the solar system? Jupiter, whose mass is more than twice that of all
other planets together. In a bowl, mix 200 g of flour with a pinch of salt, add two eggs and stir
until the dough is smooth.
"""
"""The text that predictions are compared on: prose, numbers, code."""
PLACES: Final = 128
"""So many of its tokens, each predicted from all before it."""
WORKER: Final = "hardpoint_runtime.fidelity"
REFERENCE: Final = {"dtype": "float32", "kv_cache_dtype": "float32", "quantization": None}


def measure(config: Config, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return ``kl``, ``top1`` and ``places`` of the model that ``config`` names; see
    :class:`hardpoint_runtime.fidelity.Difference`.

    Starts two engines, one after the other; ``tell`` gets a line before each. Raises HardpointError
    if one cannot start, or its platform does not compute with torch.
    """
    tell("measuring the same model in float32")
    keys = {**REFERENCE, **_reference_keys(config)}
    with LLM.from_config(replace(config, keys, "fidelity")) as llm:
        reference = _predicted(llm, "recorded")
    tell("measuring the model as configured")
    with LLM.from_config(config) as llm:
        found = _predicted(llm, "difference", reference)
        model = llm.config.model
        asked = {"dtype": model.dtype, "quantization": model.quantization}
    return {**asked, "kl": found.kl, "top1": found.top1, "places": found.places}


def _reference_keys(config: Config) -> Mapping[str, Any]:
    """Return what the platform that would run has to be told to compute its reference."""
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    return dict(platform.reference_keys)


def text_tokens(llm: LLM) -> Sequence[int]:
    """Return the tokens of the text that are used. Raises UnsupportedError for a tokenizer that
    makes almost nothing of it.
    """
    tokens = llm.tokenizer.encode(TEXT)[: PLACES + 1]
    if len(tokens) < 2:
        raise UnsupportedError(
            "fidelity", "this tokenizer", reason=f"it makes {len(tokens)} tokens of the text"
        )
    return tokens


def _predicted(llm: LLM, then: str, *args: Any) -> Any:
    """Have a place after the other predicted; return what ``then`` of the worker's module says."""
    llm.collective_rpc(resolve(f"{WORKER}:start_recording"))
    tokens = text_tokens(llm)
    # One score keeps logits from being chosen from without being written down.
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)
    for place in range(1, len(tokens)):
        llm.generate([list(tokens[:place])], params)
    rank = llm.platform.placement(llm.config).output_rank
    return llm.collective_rpc(resolve(f"{WORKER}:{then}"), args=args, reply_rank=rank)
