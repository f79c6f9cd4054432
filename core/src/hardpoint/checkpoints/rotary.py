"""How a decoder turns queries and keys by their positions, as its configuration says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.tables import shown
from hardpoint.errors import UnsupportedModelError

KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SPELLINGS: Final = {"su": "longrope"}
"""Older names of a kind."""
MOST_FACTORS: Final = 1 << 16


@frozen(kw_only=True)
class RotaryConfig:
    """One rule of rotary angles. ``size`` elements of each head are turned, the rest is not.

    ``kind`` is one of :data:`KINDS`, under the names of Hugging Face configurations; pair i turns
    by ``position * theta ** (-2 * i / size)``, which the kinds but ``default`` scale:

    * ``linear``: by 1 / ``factor``.
    * ``dynamic``: not at all up to ``original_length``, which is the model's context length, so
      that no request is longer.
    * ``llama3``: by 1 / ``factor`` where a turn takes longer than ``original_length`` /
      ``low_frequency``, and less and less so up to ``high_frequency``.
    * ``yarn``: likewise, between pairs that turn ``slow`` and ``fast`` times in
      ``original_length`` (Peng et al., 2023); rounded to whole pairs if ``truncated``.
    * ``longrope``: each pair by its own 1 / ``long_factors``, or 1 / ``short_factors`` where no
      request is longer than ``original_length`` (Ding et al., 2024).

    Cosines and sines are multiplied by ``magnitude``.
    """

    size: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0


def read_rotary(
    fields: Fields,
    head_size: int,
    context_length: int,
    *,
    layer_type: str | None = None,
    partial: bool = False,
) -> RotaryConfig:
    """Read ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``; where there is a table for
    each type of layer, that of ``layer_type``. ``partial``: heads may be turned in part.
    ``context_length`` is that of the model where the configuration does not say it.

    Raises CheckpointError for a value that cannot be, UnsupportedModelError for a rule that is not
    known.
    """
    context_length = fields.integer("max_position_embeddings", context_length)
    rope = _table(fields, layer_type)
    kind = rope.text("rope_type") or rope.text("type") or "default"
    kind = SPELLINGS.get(kind, kind)
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{fields.path}: rotary scaling {shown(kind)} is not known; known are "
            f"{', '.join(KINDS)}"
        )
    home = rope if rope.values.get("rope_theta") is not None else fields
    part = rope if rope.values.get("partial_rotary_factor") is not None else fields
    fraction = part.real("partial_rotary_factor", 1.0)
    size = int(head_size * fraction)
    if fraction != 1 and not partial:
        raise UnsupportedModelError(
            f"{fields.path}: partial_rotary_factor is {fraction:g}; heads of this architecture "
            f"that are rotated in part are not supported"
        )
    if fraction > 1 or size < 2 or size % 2:
        raise part.fail(
            "partial_rotary_factor", fraction, f"a part of heads of {head_size}, of whole pairs"
        )
    plain: dict[str, Any] = {"size": size, "theta": home.real("rope_theta", 10_000.0)}
    if plain["theta"] <= 1:
        raise home.fail("rope_theta", plain["theta"], "a number greater than 1")
    if kind == "default":
        return RotaryConfig(**plain)
    # A model's own key stands beside the table in older configurations.
    own = "original_max_position_embeddings"
    length = (rope if rope.values.get(own) is not None else fields).integer(own, context_length)
    return RotaryConfig(kind=kind, **plain, **_rule(kind, rope, length, context_length, size))


def rope_table(fields: Fields) -> tuple[str, Fields]:
    """Return the key that a configuration has its rule under, newer or older, and what is there."""
    key = "rope_parameters" if fields.values.get("rope_parameters") is not None else "rope_scaling"
    return key, Fields(fields.path, fields.table(key) or {})


def _table(fields: Fields, layer_type: str | None) -> Fields:
    key, rope = rope_table(fields)
    if not any(isinstance(value, dict) for value in rope.values.values()):
        return rope
    if layer_type is None:
        raise UnsupportedModelError(
            f"{fields.path}: {key} has a table for each of {', '.join(map(shown, rope.values))}; "
            f"this architecture is known with one for all layers"
        )
    return Fields(fields.path, rope.table(layer_type) or {})


def _rule(
    kind: str, rope: Fields, length: int, context_length: int, size: int
) -> Mapping[str, Any]:
    if kind == "dynamic":
        return {"factor": rope.real("factor"), "original_length": context_length}
    if kind == "linear":
        return {"factor": rope.real("factor"), "original_length": length}
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if high <= low:
            raise rope.fail("high_freq_factor", high, f"more than low_freq_factor, {low:g}")
        return {
            "factor": rope.real("factor"),
            "original_length": length,
            "low_frequency": low,
            "high_frequency": high,
        }
    factor = rope.real("factor", context_length / length)
    if kind == "yarn":
        return {
            "factor": factor,
            "original_length": length,
            "fast": rope.real("beta_fast", 32.0),
            "slow": rope.real("beta_slow", 1.0),
            "truncated": rope.flag("truncate", True),
            "magnitude": _yarn_magnitude(rope, factor),
        }
    return {
        "factor": factor,
        "original_length": length,
        "short_factors": _factors(rope, "short_factor", size // 2),
        "long_factors": _factors(rope, "long_factor", size // 2),
        "magnitude": rope.real("attention_factor", _long_magnitude(factor, length)),
    }


def _factors(rope: Fields, key: str, pairs: int) -> tuple[float, ...]:
    values = rope.values.get(key)
    if not isinstance(values, list) or len(values) != pairs or pairs > MOST_FACTORS:
        raise rope.fail(key, values, f"a list of {pairs} numbers")
    return tuple(Fields(rope.path, {key: value}).real(key) for value in values)


def _yarn_magnitude(rope: Fields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    some, every = rope.real("mscale", 0.0, above=-1), rope.real("mscale_all_dim", 0.0, above=-1)
    inferred = magnitude(some) / magnitude(every) if some and every else magnitude(1.0)
    return rope.real("attention_factor", inferred)


def _long_magnitude(factor: float, length: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0
