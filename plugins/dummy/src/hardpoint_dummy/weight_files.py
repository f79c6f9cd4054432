"""Files of fake weights."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from hardpoint.errors import CheckpointError
from hardpoint.records import SavedFile, WorkerContext

PATTERN = "model-rank-{rank}-part-{part}.bin"


def write_weights(
    folder: Path, content: bytes, context: WorkerContext, pattern: str | None, max_size: int | None
) -> Sequence[SavedFile]:
    """Write ``content`` to ``folder`` in parts of at most ``max_size`` bytes; return the files.

    Raises CheckpointError if the folder does not exist.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; create it first")
    size = max_size or max(1, len(content))
    parallel = context.config.parallel
    files = []
    for part, start in enumerate(range(0, max(1, len(content)), size)):
        data = content[start : start + size]
        name = (pattern or PATTERN).format(
            rank=context.rank,
            part=part,
            tp=context.rank % parallel.tensor_parallel_size,
            pp=context.rank // parallel.tensor_parallel_size,
        )
        (folder / name).write_bytes(data)
        files.append(SavedFile(name=name, sha256=sha256(data).hexdigest(), num_bytes=len(data)))
    return files
