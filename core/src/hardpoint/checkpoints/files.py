"""Files of a model folder, opened without trusting what names them.

A name that comes out of a file (a shard in an index) may not lead out of the folder, and only
regular files are opened: a FIFO, socket or device is refused before it can block or act.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from hardpoint.checkpoints.tables import shown
from hardpoint.errors import CheckpointError


def contained(folder: Path, name: str) -> Path:
    """Return the path of ``name`` in ``folder``; raise CheckpointError if it is not inside it.

    A symbolic link may point into the folder itself or, for a snapshot in a Hugging Face cache,
    into that repository's ``blobs``, which is how the cache stores every file.
    """
    parts = Path(name).parts
    if not parts or "\0" in name or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(
            f"{folder}: the file name {shown(name)} leads out of the folder; a model's files must "
            f"lie inside it"
        )
    path = folder / name
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be resolved: {error}") from error
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{path}: it is a link to {target}, outside the folder; a model's files must lie "
            f"inside it, so replace the link by the file"
        )
    return path


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered; CheckpointError for anything else, at once."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file; a model is read from files only")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened: {reason}") from error
    file = FileIO(handle)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise CheckpointError(f"{path}: not a regular file; a model is read from files only")
    return file


def read_whole(path: Path, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes; CheckpointError if it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(
                f"{path}: {size} bytes, where at most {limit} are read: this is not such a file"
            )
        return file.read(size) or b""  # a buffer of this size is made, so not of the limit's
