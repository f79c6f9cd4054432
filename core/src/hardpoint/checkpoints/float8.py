"""Weights of eight bits in safetensors folders: their numbers, and the scales stored beside them.

Number formats: "FP8 Formats for Deep Learning" (arXiv:2209.05433): E4M3 has no infinity and one NaN
(all bits set besides the sign), E5M2 is a shortened half-precision number. Scales: a tensor
``NAME_scale`` or ``NAME_scale_inv`` beside ``NAME``, which multiplies it whichever of the two it
is called, for the whole tensor, each row, or each block of ``weight_block_size`` (transformers'
``fp8`` and compressed-tensors' ``float-quantized``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve, frozen

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.errors import CheckpointError, UnsupportedModelError

SUFFIXES: Final = ("_scale_inv", "_scale")
BESIDE: Final = (
    ".weight_scale", ".weight_scale_inv", ".input_scale", ".output_scale", ".activation_scale",
    ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
"""Names, at their ends, of what stands beside the weights: scales of weights and activations."""
SCALE_TYPES: Final = ("F32", "BF16", "F16")


def _e4m3(code: int) -> float:
    sign, exponent, fraction = 1 - (code >> 6 & 2), code >> 3 & 15, code & 7
    if code & 127 == 127:
        return nan
    if not exponent:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


FLOAT8: Final = MappingProxyType(
    {
        "F8_E4M3": tuple(map(_e4m3, range(256))),
        "F8_E5M2": struct.unpack("<256e", bytes(b for code in range(256) for b in (0, code))),
    }
)
"""Element type -> the number that each of the 256 bytes stands for."""


@frozen(kw_only=True)
class Scale:
    """What the numbers of a weight are multiplied by: ``entry`` is the tensor, its shape made
    [rows, columns]; element [i, j] is for the ``block`` (rows, columns) of that place.
    """

    entry: TensorEntry
    block: tuple[int, int]


@frozen(kw_only=True)
class Scheme:
    """How a folder says its weights are scaled; ``block`` if it is in blocks."""

    block: tuple[int, int] | None = None


def scheme_of(description: ModelDescription) -> Scheme | None:
    """Return how the weights are scaled, or None if they are not. Raises UnsupportedModelError for
    a model that is quantised in another way than by 8-bit numbers and scales.
    """
    method = description.hf_config.get("quantization_config")
    if not method:
        return None
    refused = UnsupportedModelError(
        f"{description.path}: the weights are quantised ({shown(method)}), which is not supported; "
        f"supported: fp8 with a scale for each tensor, row or block; use the original model"
    )
    if not isinstance(method, dict):
        raise refused
    kind = method.get("quant_method")
    if kind == "compressed-tensors" and method.get("format") == "float-quantized":
        return Scheme(block=_block(_weights_of(method).get("block_structure"), refused))
    if kind == "fp8":
        return Scheme(block=_block(method.get("weight_block_size"), refused))
    raise refused


def _weights_of(method: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = method.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def _block(value: object, refused: UnsupportedModelError) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise refused
    rows, columns = value
    if not all(type(side) is int and 1 <= side <= 1 << 16 for side in value):
        raise refused
    return rows, columns


def is_beside_weights(name: str) -> bool:
    """Whether a tensor of a scaled model is a scale, and so no weight itself."""
    return name.endswith(BESIDE)


def scale_of(
    path: Path, weight: TensorEntry, tensors: Mapping[str, TensorEntry], scheme: Scheme
) -> Scale | None:
    """Return the scale of a weight; None for one that is not of 8-bit numbers.

    Raises CheckpointError for an 8-bit weight without a scale, or with one of a shape that is
    neither for the tensor, nor for its rows, nor for the blocks of the scheme.
    """
    if weight.type not in FLOAT8:
        return None
    names = [weight.name + suffix for suffix in SUFFIXES]
    scale = next((tensors[name] for name in names if name in tensors), None)
    if scale is None:
        raise CheckpointError(
            f"{path}: tensor {shown(weight.name)} is of 8-bit numbers, and the configuration says "
            f"it is scaled, but there is neither {shown(names[0])} nor {shown(names[1])}"
        )
    if scale.type not in SCALE_TYPES or len(weight.shape) != 2:
        raise UnsupportedModelError(
            f"{path}: tensor {shown(scale.name)} of type {scale.type} scales {shown(weight.name)} "
            f"of shape {list(weight.shape)}; supported: scales of {', '.join(SCALE_TYPES)} for "
            f"matrices"
        )
    return _fitted(path, weight, scale, scheme)


def _fitted(path: Path, weight: TensorEntry, scale: TensorEntry, scheme: Scheme) -> Scale:
    rows, columns = weight.shape
    forms: list[tuple[tuple[int, int], tuple[int, int]]] = [((1, 1), (rows, columns))]
    forms.append(((rows, 1), (1, columns)))
    if scheme.block is not None:
        high, wide = scheme.block
        forms.insert(0, ((-(-rows // high), -(-columns // wide)), scheme.block))
    for grid, block in forms:
        accepted = [grid, (grid[0],)] if grid[1] == 1 else [grid]
        if scale.shape in accepted or (grid == (1, 1) and scale.shape == ()):
            return Scale(entry=evolve(scale, shape=grid), block=block)
    expected = " or ".join(str(list(grid)) for grid, _ in forms)
    raise CheckpointError(
        f"{path}: tensor {shown(scale.name)} has shape {list(scale.shape)}, but the scale of "
        f"{shown(weight.name)} {list(weight.shape)} must have {expected}"
    )
