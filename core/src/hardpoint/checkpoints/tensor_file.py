"""What every tensor file does once its table is known: give bytes of a tensor, and close."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from hardpoint.checkpoints.files import open_regular
from hardpoint.checkpoints.tables import TensorEntry, shown
from hardpoint.errors import CheckpointError


class TensorFile:
    """A file with a tensor table, open and mapped read-only.

    A reader of a format derives from it and sets ``tensors``. ``data`` is a view of the mapping:
    no copy, but a file that somebody shortens meanwhile ends the process, which no mapping can
    prevent. ``read_into`` reads through the system instead and reports such a file.
    """

    tensors: Mapping[str, TensorEntry]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open_regular(self.path)
        try:
            self._map = self._mapped()
        except BaseException:
            self._file.close()
            raise
        self._view: memoryview | None = memoryview(self._map)

    def _mapped(self) -> mmap.mmap:
        size = os.fstat(self._file.fileno()).st_size
        if not size:
            raise CheckpointError(f"{self.path}: the file is empty; fetch it again")
        try:
            return mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: cannot be mapped into memory: {error}") from error

    def data(self, name: str) -> memoryview:
        """Return a tensor's bytes, read-only, without a copy; KeyError if there is none."""
        entry = self.tensors[name]
        if self._view is None:
            raise CheckpointError(f"{self.path}: the file was closed")
        return self._view[entry.offset : entry.offset + entry.num_bytes]

    def read_into(self, name: str, target: memoryview) -> None:
        """Read a tensor into writable memory of exactly its size; KeyError if there is none."""
        self.read_part(self.tensors[name], target)

    def read_part(self, entry: TensorEntry, target: memoryview) -> None:
        """Read the bytes of ``entry``, a row of the table or a part of one, into writable memory of
        exactly that size.
        """
        if self._view is None:
            raise CheckpointError(f"{self.path}: the file was closed")
        if target.nbytes != entry.num_bytes:
            raise ValueError(f"{target.nbytes} bytes for a tensor of {entry.num_bytes}")
        done = 0
        while done < entry.num_bytes:
            got = os.preadv(self._file.fileno(), [target[done:]], entry.offset + done)
            if not got:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(entry.name)} ends after {done} of "
                    f"{entry.num_bytes} bytes: the file was changed while it was read"
                )
            done += got

    def close(self) -> None:
        """Close the file; views given before stay valid. A second call does nothing."""
        if self._view is not None:
            self._view.release()
            self._view = None
            self._file.close()
            with contextlib.suppress(BufferError):  # views live: the last one to go unmaps
                self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
