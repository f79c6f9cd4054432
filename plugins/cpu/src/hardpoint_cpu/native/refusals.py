"""Why a model is no native program.

What is lowered is exactly what :class:`DecoderForCausalLM` computes with the built-in operations.
A model that something was changed in (another class, a hook on a module, an operation of a
plugin's) is refused: a program would leave the change out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hardpoint_runtime import host_linear, operations
from hardpoint_runtime.models.decoder import DecoderForCausalLM
from hardpoint_runtime.models.decoder_layers import DecoderAttention, DecoderLayer, DecoderMLP
from hardpoint_runtime.models.experts import Experts, SharedExpert
from hardpoint_runtime.models.layers import Embedding, Norm, Projection
from hardpoint_runtime.models.rotary import Rotary
from hardpoint_runtime.quantization import form_of
from torch import nn

from hardpoint_cpu.native.expectations import other_graphs
from hardpoint_cpu.native.lowered import KINDS
from hardpoint_cpu.native.lowering import ACTIVATIONS

if TYPE_CHECKING:
    from hardpoint_runtime.model_runner import TorchModelRunner

KNOWN = (
    DecoderForCausalLM, DecoderLayer, DecoderAttention, DecoderMLP, Projection, Norm, Embedding,
    Rotary, Experts, SharedExpert, nn.ModuleList,
)  # fmt: skip
MOST_GROUP = 64
"""Query heads of one key head that the library has room for."""


def refusal(runner: TorchModelRunner) -> str | None:
    """Return why the runner's model is not lowered, None if it can be. Called when the model is
    loaded; reads no weight.
    """
    return next(_refusals(runner), None)


def _refusals(runner: TorchModelRunner) -> Iterator[str]:
    model = runner.get_model()
    yield from other_graphs(runner.config.graph)
    for name, module in model.named_modules():
        if type(module) not in KNOWN:
            yield f"{name or 'the model'} is a {type(module).__name__}, which is not lowered yet"
        if "forward" in vars(module):
            yield f"the forward method of {name or 'the model'} was replaced"
        for key, parameter in module.named_parameters(recurse=False):
            held = parameter.dtype in KINDS or form_of(module, key) is not None
            if not held or not parameter.is_contiguous():
                yield f"{name}.{key} is {parameter.dtype}, or not in one piece"
    if isinstance(model, DecoderForCausalLM):
        yield from _unknown_parts(model)
    yield from _unknown_operations(runner.operations)
    caches = list(runner.get_kv_cache_spec().values())
    if any(cache != caches[0] for cache in caches):
        yield "its layers keep keys and values in different ways"


def _unknown_parts(model: DecoderForCausalLM) -> Iterator[str]:
    description = model.description
    if model.config.activation not in ACTIVATIONS:
        yield f"activation {model.config.activation} is not lowered yet"
    if description.num_heads // description.num_kv_heads > MOST_GROUP:
        yield f"more than {MOST_GROUP} query heads share a key head"


def _unknown_operations(used: Any) -> Iterator[str]:
    plain = operations.Operations()
    for name in operations.NAMES:
        known = {getattr(plain, name)} | ({host_linear.linear} if name == "linear" else set())
        if getattr(used, name) not in known:
            yield f"operation {name} is a plugin's"
