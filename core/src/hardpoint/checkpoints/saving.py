"""Saving a sharded state so that it is there whole or not at all. Runs in the driver.

The ranks write into a folder within the one that was asked for, so on the same disk. When all have
written, that folder is given the name COMMITTED, which decides it in one step: until then the state
is the old one, from then on the new one. What follows only puts the parts in their places, the
manifest last. Whatever ends that leaves some of them where they are found all the same; the next
save goes on with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from hardpoint.checkpoints.sharded_state import COMMITTED, MANIFEST, Manifest, manifest_in
from hardpoint.errors import CheckpointError
from hardpoint.rpc.faults import fault

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
            _end_abandoned(self.folder)
            self.place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
            self._lock = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            shutil.rmtree(self.place, ignore_errors=True)  # nothing, once it was decided
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
        self._write(manifest)
        _sync(self.place)
        fault("save.commit")
        try:
            self.place.rename(self.folder / COMMITTED)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: another save is being put in its place there "
                f"({error.strerror}); save it again"
            ) from error
        _settle(self.folder)

    def _check(self, name: str, num_bytes: int) -> None:
        path = self.place / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{path}: a rank said that it wrote {num_bytes} bytes there, and that is not so"
            )

    def _write(self, manifest: Manifest) -> None:
        with (self.place / MANIFEST).open("x", encoding="utf-8") as file:
            json.dump(manifest.document(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """Put a state that was decided in its place, and remove the old one's parts. It may be cut off
    anywhere, and done again.
    """
    _sync(folder)
    waiting = folder / COMMITTED
    new = _names(waiting / MANIFEST)
    for name in _old_names(folder) - new:
        fault("save.commit")
        (folder / name).unlink(missing_ok=True)
    for name in sorted(new):
        fault("save.commit")
        with contextlib.suppress(FileNotFoundError):  # it is in its place already
            (waiting / name).replace(folder / name)
    _sync(folder)
    fault("save.commit")
    (waiting / MANIFEST).replace(folder / MANIFEST)
    _sync(folder)
    fault("save.commit")
    shutil.rmtree(waiting)


def _names(manifest: Path) -> set[str]:
    return {file.name for files in manifest_in(manifest).files for file in files}


def _old_names(folder: Path) -> set[str]:
    """Return the parts of the state that is to be replaced; one that cannot be read has none."""
    try:
        return _names(folder / MANIFEST) if (folder / MANIFEST).exists() else set()
    except CheckpointError as error:
        _logger.warning("the parts of the old state are left where they are: %s", error)
        return set()


def _end_abandoned(folder: Path) -> None:
    """Go on with a save that was decided and then killed, and remove what one left that was killed
    before; one that goes on holds a lock.
    """
    for path in [folder / COMMITTED, *folder.glob(f"{_PREFIX}*")]:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.name == COMMITTED and (path / MANIFEST).exists():
                    _settle(folder)
                else:
                    shutil.rmtree(path)
            except CheckpointError as error:
                _logger.warning("a save that was cut off is not gone on with: %s", error)
                shutil.rmtree(path)
            finally:
                os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
