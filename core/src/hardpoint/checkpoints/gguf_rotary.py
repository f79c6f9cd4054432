"""How a GGUF file says that rotary frequencies are scaled, in the words of a config.json.

Formulas: ``convert_hf_to_gguf.py`` of llama.cpp, which stores what a Llama 3 or a longrope model
divides each frequency by as a tensor, and drops the numbers that it was computed from.
"""

from __future__ import annotations

import struct
from math import isclose, pi
from typing import Any, Final

from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.errors import CheckpointError, UnsupportedModelError

FACTORS: Final = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LARGEST_FACTOR: Final = 1e6
LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""With these every Llama 3.1, 3.2 and 3.3 was published; only their ``factor`` differs."""


def rotary_scaling(
    file: GGUFFile, fields: Fields, *, theta: float, size: int
) -> dict[str, Any] | None:
    """Return ``rope_scaling`` as a config.json has it; None if frequencies are as they are.

    ``theta`` is the base and ``size`` the rotated size of a head. Raises UnsupportedModelError for
    factors that no known formula gives.
    """
    name = fields.text("general.architecture")
    if FACTORS in file.tensors:
        return _llama3(file, theta, size)
    if LONG in file.tensors and SHORT in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": list(_factors(file, SHORT, size)),
            "long_factor": list(_factors(file, LONG, size)),
            "original_max_position_embeddings": fields.integer(
                f"{name}.rope.scaling.original_context_length"
            ),
        }
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": fields.real(f"{name}.rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer(
            f"{name}.rope.scaling.original_context_length",
            fields.integer(f"{name}.context_length"),
        ),
    }


def llama3_factors(factor: float, theta: float, size: int) -> list[float]:
    """Return what a Llama 3 of this ``factor`` divides its frequencies by, the highest first."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    original = LLAMA3["original_max_position_embeddings"]
    factors = []
    for index in range(0, size, 2):
        turns = original / (2 * pi * theta ** (index / size))
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _llama3(file: GGUFFile, theta: float, size: int) -> dict[str, Any]:
    factors = _factors(file, FACTORS, size)
    largest = max(factors)
    expected = llama3_factors(largest, theta, size)
    if not all(isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
        raise UnsupportedModelError(
            f"{file.path}: tensor {FACTORS!r} holds rotary frequency factors that are not those of "
            f"Llama 3, and no others are supported in GGUF files; use the model's safetensors "
            f"folder"
        )
    return {"rope_type": "llama3", "factor": largest, **LLAMA3}


def _factors(file: GGUFFile, name: str, size: int) -> tuple[float, ...]:
    entry = file.tensors[name]
    if entry.type != "F32" or entry.shape != (size // 2,):
        raise UnsupportedModelError(
            f"{file.path}: tensor {name!r} is {list(entry.shape)} of {entry.type}; rotary factors "
            f"are read as [{size // 2}] of F32"
        )
    factors = struct.unpack(f"<{size // 2}f", file.data(name))
    if not all(0 < factor < LARGEST_FACTOR for factor in factors):
        raise CheckpointError(
            f"{file.path}: tensor {name!r} holds what cannot be rotary factors; they are from 0 to "
            f"{LARGEST_FACTOR:g}: the file is corrupt; fetch it again"
        )
    return factors
