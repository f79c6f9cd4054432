"""Saving a sharded state so that it is there whole or not at all. Runs in the driver.

The ranks write into a folder within the one that was asked for, so on the same disk. When all have
written, the old manifest goes, then the old parts, the new parts are renamed to their places, and
the new manifest is put there last. Whatever ends this before leaves the old state, or at worst no
manifest; never a mixture that could be loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from hardpoint.checkpoints.sharded_state import MANIFEST, Manifest, has_manifest, read_manifest
from hardpoint.errors import CheckpointError

_logger = logging.getLogger("hardpoint.executor")

_PREFIX = ".saving-"


class Saving:
    """One save into ``folder``; used as a context. The ranks write to ``place``; if
    :meth:`commit` is not reached, what they wrote is removed.

    Where this host has no such folder, ``place`` is the folder itself: the ranks judge it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.place = self.folder
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self.folder.is_dir():
            _remove_abandoned(self.folder)
            self.place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
            self._lock = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            shutil.rmtree(self.place, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def commit(self, manifest: Manifest) -> None:
        """Put what the ranks wrote in its place. Raises CheckpointError if it is not what they
        said, or if this host cannot see it.
        """
        names = [file.name for files in manifest.files for file in files]
        if self._lock is None:
            raise CheckpointError(
                f"{self.folder}: the ranks wrote {len(names)} files, but this host has no such "
                f"folder, so that no {MANIFEST} can be written; save to a folder that all share"
            )
        if len(set(names)) != len(names):
            raise CheckpointError(f"{self.folder}: several ranks wrote files of one name: {names}")
        for files in manifest.files:
            for file in files:
                self._check(file.name, file.num_bytes)
        new = self._written(manifest)
        old = _old_names(self.folder)
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name in old:
            (self.folder / name).unlink(missing_ok=True)
        for name in names:
            (self.place / name).replace(self.folder / name)
        _sync(self.folder)
        new.replace(self.folder / MANIFEST)
        _sync(self.folder)

    def _check(self, name: str, num_bytes: int) -> None:
        path = self.place / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{path}: a rank said that it wrote {num_bytes} bytes there, and that is not so"
            )

    def _written(self, manifest: Manifest) -> Path:
        path = self.place / MANIFEST
        with path.open("x", encoding="utf-8") as file:
            json.dump(manifest.document(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        return path


def _old_names(folder: Path) -> Iterable[str]:
    """Return the parts of the state that is to be replaced; one that cannot be read has none."""
    try:
        old = read_manifest(folder) if has_manifest(folder) else None
    except CheckpointError as error:
        _logger.warning("the parts of the old state are left where they are: %s", error)
        return ()
    return () if old is None else [file.name for files in old.files for file in files]


def _remove_abandoned(folder: Path) -> None:
    """Remove what a save left that was killed; one that goes on holds a lock."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
