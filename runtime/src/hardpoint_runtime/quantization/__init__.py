"""Weights that are held packed: what their bytes are, who packs them, and loading them so."""

from __future__ import annotations

from hardpoint_runtime.quantization.method import Piece, Place, Quantization
from hardpoint_runtime.quantization.packed_form import PackedForm, PackedPart, StoredRows, form_of

__all__ = ["PackedForm", "PackedPart", "Piece", "Place", "Quantization", "StoredRows", "form_of"]
