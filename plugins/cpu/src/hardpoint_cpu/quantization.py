"""Weights in the native library's packed forms: as a GGUF file has them, or as ``quantization``
says.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.loading.packed import PLAIN
from hardpoint_runtime.quantization import (
    PackedForm,
    PackedPart,
    Piece,
    Place,
    Quantization,
    StoredRows,
)
from hardpoint_runtime.quantization.packed_form import hold_packed

from hardpoint_cpu import large_pages
from hardpoint_cpu.native import packing
from hardpoint_cpu.packed_cache import NewFile, PackedCache, cache_folder, key_of
from hardpoint_cpu.settings import CpuSettings

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint_runtime.loading.weights import Weights
    from hardpoint_runtime.quantization.method import Packed
    from torch import Tensor

_logger = logging.getLogger("hardpoint.worker")

GGUF_KINDS: Final = {
    "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k", "Q6_K": "q6_k"
}  # fmt: skip
"""Block type of a file -> the library's type that has the same numbers."""
ROUNDED: Final = ("int8", "w8a8", "w4a8")
"""The library's types that any numbers are rounded to."""
LEAST_KEPT: Final = 32 << 20
"""Bytes of a model from which its packed weights are kept: less is packed in a moment."""
PANEL: Final = 16
"""Rows that are packed together."""
SPLIT: Final = 1 << 20
"""Numbers from which rows are packed by several threads."""
NUMBERS: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class NativeForm(PackedForm):
    """A matrix that the library packed. ``whole``: each tensor of it is here with all its columns,
    so that blocks of a file are not cut.
    """

    def __init__(
        self, rows: int, cols: int, parts: Sequence[PackedPart], dtype: torch.dtype, *, whole: bool
    ) -> None:
        super().__init__(rows, cols, parts, dtype)
        self._whole = whole

    def takes_stored(self, first: int, kind: str | None) -> bool:
        """Blocks of a file are packed exactly, or opened and rounded in one go, as numbers are."""
        own = self._part(first).kind
        return self._whole and kind in GGUF_KINDS and own in (GGUF_KINDS[kind], *ROUNDED)

    def pack(self, memory: Tensor, first: int, rows: Tensor | StoredRows) -> None:
        """Pack rows, which lie within one part."""
        part = self._part(first)
        if isinstance(rows, StoredRows):
            source, kind = rows.data.contiguous().numpy(), GGUF_KINDS[rows.kind]
        else:
            source, kind = _as_array(rows), NUMBERS[rows.dtype]
        out, start = self._bytes(memory, part), first - part.first

        def pack(span: tuple[int, int]) -> None:
            packing.pack(
                source[span[0] : span[1]], kind, part.kind, cols=self.cols, rows=part.rows,
                first=start + span[0], out=out,
            )  # fmt: skip

        spans = _spans(start, len(source), self.cols)
        with ThreadPoolExecutor(len(spans)) as pool:
            list(pool.map(pack, spans))

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

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self._left: list[Place] = []

    def hold(self, plan: Sequence[Packed], weights: Weights) -> Collection[str]:
        """Give the matrices their memory, in large pages if they are worth it."""
        self._tell()
        sizes = [each.form.num_bytes for each in plan]
        if not large_pages.can_be_had(sum(sizes)):
            return super().hold(plan, weights)
        for each, memory in zip(plan, large_pages.allocate(sizes), strict=True):
            hold_packed(each.module, each.parameter, each.form, memory)
        return ()

    def create(self, place: Place) -> PackedForm | None:
        """See :class:`Quantization`."""
        runs = list(self._runs(place.pieces))
        if any(kind is None for kind, _, _ in runs) or (place.alike and len(runs) > 1):
            if {piece.stored for piece in place.pieces if piece.stored} - PLAIN.keys():
                self._left.append(place)
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
        whole = all(piece.whole for piece in place.pieces)
        return NativeForm(place.rows, place.cols, parts, self.dtype, whole=whole)

    def _tell(self) -> None:
        """Say once what a file has in blocks and is unpacked."""
        stored = {
            piece.stored for place in self._left for piece in place.pieces if piece.stored
        } - PLAIN.keys()
        if stored:
            first = self._left[0]
            _logger.info(
                "matrices that are stored as %s are unpacked (%d, the first %s.%s): a program "
                "multiplies whole rows of %s, and the experts of a layer if they are of one type",
                ", ".join(sorted(stored)), len(self._left), first.module, first.parameter,
                ", ".join(GGUF_KINDS),
            )  # fmt: skip

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


class Quantised(NativePacking):
    """Packs everything as one kind, whatever it was. That takes time, so what comes out is kept
    (:mod:`hardpoint_cpu.packed_cache`); blocks of a GGUF file are packed as fast as they are read.
    """

    _new: NewFile | None = None

    def hold(self, plan: Sequence[Packed], weights: Weights) -> Collection[str]:
        """Map what was packed before; else take memory that can be kept."""
        sizes = [-(-each.form.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for each in plan]
        folder = cache_folder(self._settings.packed_cache)
        files = weights.files()
        if folder is None or not files or sum(sizes) < LEAST_KEPT:
            return super().hold(plan, weights)
        cache = PackedCache(folder, self._settings.packed_cache_bytes)
        key = key_of(files, self._spelled(plan))
        kept = cache.open(key, sum(sizes))
        if kept is not None:
            _logger.info("packed weights are mapped from %s", folder)
            _share_out(plan, sizes, _read_often(kept))
            return [name for each in plan for name in each.weights]
        self._new = cache.begin(key, sum(sizes))
        if self._new is None:
            return super().hold(plan, weights)
        _share_out(plan, sizes, _bytes_of(self._new.weights))
        return ()

    def loaded(self, plan: Sequence[Packed]) -> None:
        """Keep what was packed."""
        if self._new is None:
            return
        sizes = [-(-each.form.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for each in plan]
        try:
            _share_out(plan, sizes, _read_often(self._new.finish(), self._new.weights))
        finally:
            self._new.close()
            self._new = None

    def _spelled(self, plan: Sequence[Packed]) -> Iterator[str]:
        """Yield all that decides the bytes beside the checkpoint's files."""
        yield f"{platform.machine()} {packing.layout()} {version('hardpoint-cpu')} {self.dtype}"
        for each in plan:
            yield f"{each.name} {each.form.rows} {each.form.cols} {each.form.parts} {each.weights}"

    @property
    def _settings(self) -> CpuSettings:
        found = self.config.plugins.settings.get("cpu")
        return found if isinstance(found, CpuSettings) else CpuSettings()


class Int8(Quantised):
    """Eight-bit weights, activations in float32."""

    kind = "int8"


class W8A8(Quantised):
    """Eight-bit weights and activations."""

    kind = "w8a8"


class W4A8(Quantised):
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


def _spans(start: int, rows: int, cols: int) -> list[tuple[int, int]]:
    """Return first and last of the rows, counted from ``start`` on, that each thread packs: whole
    panels, as two threads must not write one.
    """
    threads = max(1, min(_cores(), rows * cols // SPLIT))
    step = -(-rows // threads // PANEL) * PANEL
    edges = [0, *range(step - start % PANEL, rows, step), rows]
    return list(itertools.pairwise(edges))


def _cores() -> int:
    """Return how many threads may pack: as many as there are cores for this process."""
    return len(os.sched_getaffinity(0))


def _share_out(plan: Sequence[Packed], sizes: Sequence[int], memory: Tensor) -> None:
    """Have each matrix of ``plan`` held in its part of ``memory``."""
    for each, own in zip(plan, memory.split(list(sizes)), strict=True):
        hold_packed(each.module, each.parameter, each.form, own[: each.form.num_bytes])


def _bytes_of(file: mmap.mmap) -> Tensor:
    return torch.frombuffer(file, dtype=torch.uint8)


def _read_often(file: mmap.mmap, written: mmap.mmap | None = None) -> Tensor:
    """Return the bytes of a mapped file for steps to read: in large pages, where those can be had,
    and else where they are mapped. ``written``: another mapping that has them in memory by now.
    """
    if not large_pages.can_be_had(len(file)):
        return _bytes_of(file)
    return large_pages.take(written or file)
