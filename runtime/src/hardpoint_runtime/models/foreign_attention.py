"""Paged attention as an attention function of transformers, for modelling code that is its own.

Registered once a process under :data:`NAME`. What step it is in, it reads from the forward context;
which layer, from the module that calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from attrs import field, frozen
from hardpoint.errors import UnsupportedModelError

from hardpoint_runtime import forward_context

NAME: Final = "hardpoint_paged"
PROBE: Final = "hardpoint_runtime.foreign_probe"
"""Key of :attr:`ForwardContext.extra` under which a :class:`Probe` is."""
OPERATIONS: Final = "hardpoint_operations"
"""Attribute of a module that attends: what it calls."""
FOREIGN: Final = ("s_aux", "position_bias", "alibi", "head_mask", "block_mask")
"""Keywords of attention functions that change what is computed in ways that are not known here."""


def layer_name(index: int) -> str:
    """Return a layer's key in the step's metadata and caches."""
    return f"layers.{index}.attention"


@frozen(kw_only=True)
class Shape:
    """What one layer keeps of a token."""

    kv_heads: int
    head_k: int
    head_v: int


@frozen
class Probe:
    """Takes down which layers attend, in a forward that computes nothing."""

    layers: dict[int, Shape] = field(factory=dict)

    def note(self, index: int, shape: Shape) -> None:
        """Add one call. Raises UnsupportedModelError for a layer that attends twice."""
        if index in self.layers:
            raise UnsupportedModelError(f"layer {index} attends more than once")
        self.layers[index] = shape


def register(interface: Any) -> None:
    """Make the function known to transformers' ``ALL_ATTENTION_FUNCTIONS``; again does nothing."""
    interface.register(NAME, paged_attention)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [1, T, heads, head_v] of ``query`` [1, heads, T, head] to the cache, after
    writing ``key`` and ``value`` [1, kv_heads, T, head] there; and None for the weights.

    Called by attention layers of transformers. Raises UnsupportedModelError for what would change
    the result and is not known here, CancelledStepError if the step was cancelled.
    """
    step = forward_context.current()
    step.raise_if_cancelled()
    index = _checked_layer(module, attention_mask, more)
    window = _window(module, index, more)
    heads = Shape(kv_heads=key.shape[1], head_k=key.shape[3], head_v=value.shape[3])
    probe = step.extra.get(PROBE)
    if isinstance(probe, Probe):
        probe.note(index, heads)
        shape = (1, query.shape[2], query.shape[1], heads.head_v)
        return query.new_empty(shape), None
    name = layer_name(index)
    cache, metadata, operations = (
        step.kv_caches[name],
        step.attention[name],
        getattr(module, OPERATIONS),
    )
    queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    operations.kv_write(keys, values, cache.key, cache.value, metadata)
    options: dict[str, Any] = {"scale": query.shape[3] ** -0.5 if scaling is None else scaling}
    if window is not None:
        options["window"] = window
    if softcap is not None:
        options["softcap"] = softcap
    out = operations.attention(queries, cache.key, cache.value, metadata, **options)
    return out[None], None


def _checked_layer(module: Any, mask: torch.Tensor | None, more: Mapping[str, Any]) -> int:
    kind = type(module).__name__
    if mask is not None:
        raise UnsupportedModelError(f"{kind} brings an attention mask of its own")
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedModelError(f"{kind} attends in both directions")
    for name in FOREIGN:
        if more.get(name) is not None:
            raise UnsupportedModelError(f"{kind} attends with {name}")
    index = getattr(module, "layer_idx", None)
    if type(index) is not int:
        raise UnsupportedModelError(f"{kind} does not know which layer it is in")
    return index


def _window(module: Any, index: int, more: Mapping[str, Any]) -> int | None:
    """Return how far a layer sees. Where it gives no window, its mask would have: the configuration
    says which.
    """
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    stated = getattr(config, "sliding_window", None)
    if types is not None and "sliding_window" not in more:
        return stated if types[index] == "sliding_attention" else None
    if "sliding_window" not in more and stated and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not say whether it sees a window of {stated}"
        )
    window: int | None = more.get("sliding_window")
    return window
