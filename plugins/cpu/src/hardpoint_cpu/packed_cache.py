"""Quantised weights kept as files, so that a second start maps them instead of packing them again.

A file is a head and the bytes as they are in memory. It is named after all that decides them: what
the checkpoint's files hold, how each matrix is packed, and the library's layout. Nothing in it is
believed: its size must be just what the matrices need, the bytes must have the sum that the head
says; else it is made anew. The folder belongs to the user alone, the files too. A file appears
whole or not at all, and the oldest go when all together would be too large.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from attrs import frozen

_logger = logging.getLogger("hardpoint.worker")

MAGIC: Final = b"hardpoint packed 1\n"
HEAD: Final = 4096
"""Bytes before the weights: a page, so that these can be mapped by themselves."""
SUFFIX: Final = ".packed"
SAMPLES, SAMPLE = 64, 1 << 16
"""So many places of a checkpoint's file are read to know it, so many bytes at each."""


def cache_folder(setting: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder that ``plugins.cpu.packed_cache`` means; None for no cache."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    known = os.environ if environ is None else environ
    home = known.get("XDG_CACHE_HOME") or str(Path(known.get("HOME", "~")).expanduser() / ".cache")
    return Path(home) / "hardpoint" / "packed"


def key_of(files: Sequence[Path], parts: Iterable[str]) -> str:
    """Return the name of what is made of ``files`` in the way that ``parts`` spell.

    Of a file count its size, when it was last changed, and what is in places all over it: reading
    all of a large checkpoint would take as long as packing it.
    """
    digest = sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in files:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            digest.update(f"{about.st_size} {about.st_mtime_ns}\0".encode())
            for index in range(SAMPLES):
                file.seek(index * max(0, about.st_size - SAMPLE) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


class PackedCache:
    """The files of ``folder``, which together take at most ``most_bytes``."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def open(self, key: str, num_bytes: int) -> mmap.mmap | None:
        """Return the weights ``key``, mapped, or None if they are to be packed. The mapping may be
        written to; the file stays as it is.
        """
        path = self.folder / f"{key}{SUFFIX}"
        try:
            if not self._is_private():
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.info("packed weights are not taken from %s: %s", path, error.strerror)
            return None
        with os.fdopen(descriptor, "rb") as file:
            reason = _reason_against(os.fstat(file.fileno()), num_bytes)
            if reason is None:
                weights = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=HEAD)
                if _head(key, weights) == file.read(HEAD):
                    with contextlib.suppress(OSError):  # another user's clock is not needed
                        os.utime(path)  # used now: the last to go
                    return weights
                reason = "its bytes are not those that were written"
        _logger.warning("packed weights are made anew: %s: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def begin(self, key: str, num_bytes: int) -> NewFile | None:
        """Return a new file to pack the weights into; None, and the log says why, if there can be
        none. Older files may go.
        """
        if num_bytes + HEAD > self.most_bytes:
            _logger.info("%d bytes of packed weights are more than the cache may have", num_bytes)
            return None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return None
            self._make_room(num_bytes + HEAD)
            descriptor = os.open(
                self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR
            )
            try:
                os.posix_fallocate(descriptor, 0, HEAD + num_bytes)  # a full disk is told here
                weights = mmap.mmap(descriptor, num_bytes, offset=HEAD)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            _logger.info("packed weights are not kept in %s: %s", self.folder, error.strerror)
            return None
        return NewFile(self.folder / f"{key}{SUFFIX}", key, descriptor, weights)

    def _is_private(self) -> bool:
        """Whether nobody else can write into the folder; said in the log if so."""
        about = self.folder.stat()
        private = about.st_uid == os.geteuid() and not about.st_mode & 0o022
        if not private:
            _logger.warning("packed weights are not kept in %s: others may write it", self.folder)
        return private

    def _make_room(self, wanted: int) -> None:
        """Remove the files that were not used for longest until there is room."""
        kept = sorted(_used(self.folder), key=lambda each: each.used_at)
        total = sum(each.num_bytes for each in kept)
        for each in kept:
            if total + wanted <= self.most_bytes:
                return
            with contextlib.suppress(OSError):
                each.path.unlink()
            total -= each.num_bytes


class NewFile:
    """A file without a name, which goes if it is not finished. ``weights``: its memory, zero."""

    def __init__(self, path: Path, key: str, descriptor: int, weights: mmap.mmap) -> None:
        self._path, self._key, self._descriptor = path, key, descriptor
        self.weights = weights

    def finish(self) -> mmap.mmap:
        """Give it its name; return its memory, mapped so that writing changes no file."""
        try:
            os.pwrite(self._descriptor, _head(self._key, self.weights), 0)
            private = mmap.mmap(
                self._descriptor, len(self.weights), access=mmap.ACCESS_COPY, offset=HEAD
            )
            part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            # With a folder, which an absolute path does not need, it is linkat(2), which follows.
            os.link(f"/proc/self/fd/{self._descriptor}", part, src_dir_fd=self._descriptor)
            part.replace(self._path)
        except OSError as error:
            _logger.info("packed weights are not kept as %s: %s", self._path, error.strerror)
            return self.weights
        return private

    def close(self) -> None:
        """Let go of the file; mappings stay."""
        os.close(self._descriptor)


@frozen
class _Used:
    path: Path
    num_bytes: int
    used_at: float


def _used(folder: Path) -> Iterator[_Used]:
    """Yield the files of the folder, those too that a killed process left without their name."""
    for path in folder.iterdir():
        if SUFFIX in path.name:
            with contextlib.suppress(OSError):
                about = path.lstat()
                yield _Used(path, about.st_size, about.st_mtime)


def _reason_against(about: os.stat_result, num_bytes: int) -> str | None:
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        return "it is no file of this user alone"
    if about.st_size != HEAD + num_bytes:
        return f"it has {about.st_size} bytes, not {HEAD + num_bytes}"
    return None


def _head(key: str, weights: mmap.mmap) -> bytes:
    """Return the first page of the file of ``weights``."""
    text = MAGIC + f"{key} {len(weights)} {zlib.crc32(weights):08x}\n".encode()
    return text.ljust(HEAD, b"\0")
