"""What every reader shares: one row of a tensor table, and how names from a file are shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Final

from attrs import frozen

from hardpoint.errors import CheckpointError

LONGEST_SHOWN = 80
FLOAT_TYPES: Final = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)
"""Plain types, as all formats name them -> name of the dtype."""


@frozen(kw_only=True)
class TensorEntry:
    """One tensor of a file.

    ``shape`` is outermost first. ``type`` is the file format's own name of the element or block
    type (``F32``, ``BF16``, ``Q4_1``). ``offset`` counts bytes from the beginning of the file;
    ``num_bytes`` is what the shape and type come to, checked against the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


def shown(name: object) -> str:
    """Quote a value from a file for a message: one line, escaped, not longer than fits."""
    text = ascii(name)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 4]}...{text[-1]}"


def some(names: Iterable[str], limit: int = 5) -> str:
    """List the first few names, and how many more there are."""
    every = list(names)
    text = ", ".join(shown(name).strip("'\"") for name in every[:limit])
    return text if len(every) <= limit else f"{text} and {len(every) - limit} more"


def check_layout(
    path: Path, entries: Iterable[TensorEntry], *, start: int, end: int, alignment: int = 1
) -> None:
    """Raise CheckpointError unless the tensors fill ``start`` to ``end`` without overlap or gap.

    Between two tensors, and after the last, there may be as many bytes as the alignment needs, and
    no more: bytes that no table names are how one file pretends to be two.
    """
    position, previous = start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        tensor = f"{path}: tensor {shown(entry.name)}"
        if entry.offset < position:
            raise CheckpointError(
                f"{tensor} begins at byte {entry.offset}, inside {previous}, which ends at "
                f"{position}: the file is corrupt; fetch it again"
            )
        if entry.offset + entry.num_bytes > end:
            raise CheckpointError(
                f"{tensor} needs bytes {entry.offset} to {entry.offset + entry.num_bytes}, but the "
                f"file ends at {end}: it is truncated or corrupt; fetch it again"
            )
        if entry.offset - position >= alignment:
            raise CheckpointError(
                f"{tensor} begins at byte {entry.offset}, {entry.offset - position} bytes after "
                f"{previous}: the table leaves a gap, so the file is corrupt; fetch it again"
            )
        position, previous = entry.offset + entry.num_bytes, f"tensor {shown(entry.name)}"
    if end - position >= alignment:
        raise CheckpointError(
            f"{path}: {end - position} bytes follow {previous}, which the table says is the last: "
            f"the file is corrupt; fetch it again"
        )
