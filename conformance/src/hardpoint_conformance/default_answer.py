"""What the default model says, recorded: for platforms that run real checkpoints.

By transformers in float32 from the unpacked weights (SmolLM2-135M-Instruct, Q4_1), greedily.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen
from hardpoint.default_model import find_default_model
from hardpoint.errors import HardpointError

PROMPT = (504, 3575, 282, 4649, 314)
"""The capital of France is"""
DECIDED = 0.2
"""Ids are compared up to the first place where the two best are closer than this."""
TOLERANCE = 0.1
"""How far a log-probability may be off: packed weights are computed in several ways."""


@frozen
class Chosen:
    """One greedy id, its log-probability, and how far ahead of the next best it was."""

    token: int
    logprob: float
    gap: float


ANSWER = (
    Chosen(7042, -0.2581, 2.483), Chosen(30, -0.3801, 1.278), Chosen(198, -1.0093, 1.426),
    Chosen(198, -0.8793, 1.338), Chosen(504, -1.936, 0.839), Chosen(2988, -3.2094, 0.22),
    Chosen(314, -0.3503, 1.634), Chosen(42, -0.4637, 1.96), Chosen(216, -0.6924, 2.185),
    Chosen(34, -1.2345, 0.398), Chosen(32, -1.7622, 0.292), Chosen(33, -1.5879, 0.374),
    Chosen(40, -1.4345, 0.162),
)  # fmt: skip


def installed_model() -> Path | None:
    """Return the default model's file, or None where it is not installed."""
    try:
        return find_default_model()
    except HardpointError:
        return None
