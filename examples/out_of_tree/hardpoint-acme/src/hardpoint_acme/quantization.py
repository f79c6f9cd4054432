"""``quantization = "acme8"``: a byte for each weight of a matrix, a scale for each row."""

from __future__ import annotations

import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.quantization import (
    PackedForm,
    PackedPart,
    Place,
    Quantization,
    StoredRows,
)

LARGEST = 127
SCALE_BYTES = 4


class ByteRows(Quantization):
    """Packs every matrix that may be packed. The toolkit makes it, fills its forms as weights are
    read, and computes with them.
    """

    def create(self, place: Place) -> PackedForm:
        """Return the form of one matrix: all of its rows in one part."""
        num_bytes = place.rows * (SCALE_BYTES + place.cols)
        part = PackedPart(kind="acme8", first=0, rows=place.rows, offset=0, num_bytes=num_bytes)
        return ByteForm(place.rows, place.cols, [part], self.dtype)


class ByteForm(PackedForm):
    """float32 scales [rows], then int8 [rows, cols]: a weight is its byte times its row's scale."""

    def takes_stored(self, first: int, kind: str | None) -> bool:
        """No file has such rows."""
        return False

    def pack(self, memory: torch.Tensor, first: int, rows: torch.Tensor | StoredRows) -> None:
        """Round rows of numbers, on the host, and copy them to the unit."""
        if isinstance(rows, StoredRows):
            raise UnsupportedError(f"rows of {rows.kind}", "acme8", reason="they are no numbers")
        wide = rows.float()
        scales = wide.abs().amax(1).clamp_min(1e-12) / LARGEST
        held = slice(first, first + len(rows))
        with torch.no_grad():
            self.scales(memory)[held].copy_(scales)
            self.bytes(memory)[held].copy_((wide / scales[:, None]).round().to(torch.int8))

    def unpack(self, memory: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on, float32 [count, cols]."""
        held = slice(first, first + count)
        return self.bytes(memory)[held].float() * self.scales(memory)[held, None]

    def look_up(self, memory: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``ids`` [T] as [T, cols]; the host does not learn which."""
        wide = self.bytes(memory).index_select(0, ids).float()
        return (wide * self.scales(memory).index_select(0, ids)[:, None]).to(self.dtype)

    def scales(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the scales [rows] as they lie in ``memory``."""
        return memory[: SCALE_BYTES * self.rows].view(torch.float32)

    def bytes(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the weights [rows, cols] as they lie in ``memory``."""
        return memory[SCALE_BYTES * self.rows :].view(torch.int8).view(self.rows, self.cols)
