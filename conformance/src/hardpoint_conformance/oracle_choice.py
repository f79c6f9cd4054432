"""Which oracle a platform is compared with, and how close it must come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint_conformance.llama_oracle import LlamaOracle

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription

    from hardpoint_conformance.oracle import Oracle
    from hardpoint_conformance.probe import Probe

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
"""Data type of the weights -> how far a log-probability may be from the oracle's."""


def oracle_for(probe: Probe, description: ModelDescription) -> Oracle:
    """Return the plugin's own oracle, or the kit's."""
    return probe.oracle(description) or LlamaOracle(description)


def tolerance_for(probe: Probe, dtype: str) -> float:
    """Return how far log-probabilities may be off."""
    own = probe.logit_tolerance
    return TOLERANCES.get(dtype, max(TOLERANCES.values())) if own is None else own
