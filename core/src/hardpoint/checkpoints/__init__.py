"""Model files, read without trusting them and without an array library: tables, sizes, metadata."""

from __future__ import annotations

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.identification import read_description
from hardpoint.checkpoints.weight_source import WeightSource

__all__ = ["ModelDescription", "WeightSource", "read_description"]
