"""What the readers of architectures share: one key of a configuration, read and checked.

Names and defaults of keys are those of Hugging Face configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

from hardpoint.checkpoints.decoder import DecoderConfig, ExpertsConfig, LayerConfig
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.rotary import read_rotary
from hardpoint.checkpoints.tables import shown
from hardpoint.errors import UnsupportedModelError

ACTIVATIONS: Final = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)
"""Name in a configuration -> the operation it is a part of."""
FULL, SLIDING = "full_attention", "sliding_attention"


def fields_of(description: ModelDescription) -> Fields:
    """Return the configuration's keys."""
    return Fields(description.path, description.hf_config)


def decoder(
    description: ModelDescription,
    fields: Fields,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str | None = None,
    windows: Sequence[int | None] = (),
    sparse: Sequence[bool] = (),
    rotary_of: Sequence[int] = (),
    **more: Any,
) -> DecoderConfig:
    """Return a decoder: what all architectures read alike, with ``eps`` and ``tied`` where the
    configuration does not say it; ``windows``, ``sparse`` and ``rotary_of`` have a value for each
    layer, ``more`` is of :class:`DecoderConfig`.
    """
    activation = activation or fields.text("hidden_act", "silu") or "silu"
    if activation not in ACTIVATIONS:
        raise unsupported(fields, "the activation", activation, f"known: {', '.join(ACTIVATIONS)}")
    count, head = description.num_layers, description.head_size
    layers = tuple(
        LayerConfig(window=window, sparse=has_experts, rotary=rotary)
        for window, has_experts, rotary in zip(
            windows or [None] * count,
            sparse or [False] * count,
            rotary_of or [0] * count,
            strict=True,
        )
    )
    if "rotaries" not in more:
        more["rotaries"] = (read_rotary(fields, head, description.context_length),)
    return DecoderConfig(
        **{
            "layers": layers,
            "norm_eps": fields.real("rms_norm_eps", eps),
            "tied": fields.flag("tie_word_embeddings", tied),
            "query_scale": head**-0.5,
            "activation": ACTIVATIONS[activation],
            **more,
        }
    )


def windowed(description: ModelDescription) -> list[int | None]:
    """Return ``sliding_window`` for every layer."""
    window = fields_of(description).integer("sliding_window", 0)
    return [window or None] * description.num_layers


def some_windows(description: ModelDescription) -> list[int | None]:
    """Return Qwen's: layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    fields = fields_of(description)
    if not fields.flag("use_sliding_window", False):
        return [None] * description.num_layers
    first = fields.integer("max_window_layers", 28, low=0)
    default = [FULL if index < first else SLIDING for index in range(description.num_layers)]
    return windows_of(fields, layer_types(description, fields, default), 4096)


def layer_types(description: ModelDescription, fields: Fields, pattern: Sequence[str]) -> list[str]:
    """Return ``layer_types``, or ``pattern`` over and over."""
    count = description.num_layers
    stated = fields.values.get("layer_types")
    if stated is None:
        return [pattern[index % len(pattern)] for index in range(count)]
    if not isinstance(stated, list) or len(stated) != count:
        raise fields.fail("layer_types", stated, f"a list of {count} types")
    for each in stated:
        if each not in (FULL, SLIDING):
            raise unsupported(fields, "layer_types", each, f"known: {FULL}, {SLIDING}")
    return stated


def windows_of(fields: Fields, types: Sequence[str], default: int) -> list[int | None]:
    """Return ``sliding_window`` for the layers that have one."""
    window = fields.integer("sliding_window", default)
    return [window if each == SLIDING else None for each in types]


def cap(fields: Fields, key: str, default: float | None) -> float | None:
    """Return a cap; None if the configuration says that there is none."""
    if key in fields.values and fields.values[key] is None:
        return None
    return default if fields.values.get(key) is None else fields.real(key)


def checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Return the experts. Raises CheckpointError for fewer than a token takes."""
    if experts.per_token > experts.count:
        raise fields.fail("num_experts_per_tok", experts.per_token, f"at most {experts.count}")
    return experts


def unsupported(
    fields: Fields, key: str, value: object, known: str | None = None
) -> UnsupportedModelError:
    """Make the error for a value that is not supported."""
    hint = "" if known is None else f"; {known}"
    return UnsupportedModelError(
        f"{fields.path}: {key} is {shown(value)}, which the built-in model does not support{hint}"
    )
