"""Model files, read without trusting them and without an array library: tables, sizes, metadata."""

from __future__ import annotations

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.identification import read_description

__all__ = ["ModelDescription", "read_description"]
