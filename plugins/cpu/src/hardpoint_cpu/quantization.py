"""Weights in the native library's packed forms: as a GGUF file has them, or as ``quantization``
says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.quantization import (
    PackedForm,
    PackedPart,
    Piece,
    Place,
    Quantization,
    StoredRows,
)

from hardpoint_cpu.native import packing

if TYPE_CHECKING:
    from torch import Tensor

GGUF_KINDS: Final = {
    "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k", "Q6_K": "q6_k"
}  # fmt: skip
"""Block type of a file -> the library's type that has the same numbers."""
NUMBERS: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class NativeForm(PackedForm):
    """A matrix that the library packed."""

    def takes_stored(self, first: int, kind: str | None) -> bool:
        """Blocks of a file are packed exactly."""
        return kind in GGUF_KINDS and self._part(first).kind == GGUF_KINDS[kind]

    def pack(self, memory: Tensor, first: int, rows: Tensor | StoredRows) -> None:
        """Pack rows, which lie within one part."""
        part = self._part(first)
        if isinstance(rows, StoredRows):
            source, kind = rows.data.contiguous().numpy(), GGUF_KINDS[rows.kind]
        else:
            source, kind = _as_array(rows), NUMBERS[rows.dtype]
        packing.pack(
            source, kind, part.kind, cols=self.cols, rows=part.rows, first=first - part.first,
            out=self._bytes(memory, part),
        )  # fmt: skip

    def unpack(self, memory: Tensor, first: int, count: int) -> Tensor:
        """Return numbers as the kernels multiply them."""
        found = [
            packing.unpack(
                self._bytes(memory, part), part.kind, rows=part.rows, cols=self.cols,
                first=start - part.first, count=stop - start,
            )
            for part in self.parts
            for start, stop in [_overlap(part, first, first + count)]
            if stop > start
        ]  # fmt: skip
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))

    def _part(self, row: int) -> PackedPart:
        return next(part for part in reversed(self.parts) if part.first <= row)

    def _bytes(self, memory: Tensor, part: PackedPart) -> np.ndarray:
        return memory.detach().numpy()[part.offset : part.offset + part.num_bytes]


class NativePacking(Quantization):
    """Packs every matrix that a file has in blocks as it is, and leaves the others as numbers."""

    kind: ClassVar[str | None] = None
    """What everything is packed as instead."""

    def create(self, place: Place) -> PackedForm | None:
        """See :class:`Quantization`."""
        runs = list(self._runs(place.pieces))
        if any(kind is None for kind, _, _ in runs):
            return None
        parts: list[PackedPart] = []
        offset = 0
        for kind, first, rows in runs:
            size = None if kind is None else packing.packed_bytes(kind, rows, place.cols)
            if kind is None or size is None:
                return self._not_packed(place, kind)
            parts.append(
                PackedPart(kind=kind, first=first, rows=rows, offset=offset, num_bytes=size)
            )
            offset += -(-size // packing.ALIGNMENT) * packing.ALIGNMENT
        return NativeForm(place.rows, place.cols, parts, self.dtype)

    def _runs(self, pieces: Sequence[Piece]) -> Iterator[tuple[str | None, int, int]]:
        """Yield kind, first row and rows of neighbours that are packed alike."""
        for kind, group in itertools.groupby(pieces, self._kind_of):
            own = list(group)
            yield kind, own[0].first, sum(piece.rows for piece in own)

    def _kind_of(self, piece: Piece) -> str | None:
        if self.kind is not None:
            return self.kind
        return GGUF_KINDS.get(piece.stored or "") if piece.whole else None

    def _not_packed(self, place: Place, kind: str | None) -> None:
        if self.kind is not None:
            raise UnsupportedError(
                f"quantization = {self.kind!r}",
                f"{place.module}.{place.parameter} [{place.rows}, {place.cols}]",
                reason=f"the native library does not pack it as {kind}",
                hint="Leave the key out.",
            )


class Int8(NativePacking):
    """Eight-bit weights, activations in float32."""

    kind = "int8"


class W8A8(NativePacking):
    """Eight-bit weights and activations."""

    kind = "w8a8"


class W4A8(NativePacking):
    """Four-bit weights, eight-bit activations."""

    kind = "w4a8"


def _as_array(rows: Tensor) -> np.ndarray:
    """Return numbers over the same memory; bfloat16, which numpy has not, as its bits."""
    whole = rows.contiguous()
    if whole.dtype == torch.bfloat16:
        whole = whole.view(torch.int16)
    found: np.ndarray = whole.numpy()
    return found


def _overlap(part: PackedPart, first: int, last: int) -> tuple[int, int]:
    return max(first, part.first), min(last, part.first + part.rows)
