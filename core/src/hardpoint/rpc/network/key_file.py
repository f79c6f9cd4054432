"""The file by which leader and followers know each other, before anything else is known.

It holds a pair of keys for either side. All other keys are made for one run and handed over by the
connection that these two protect.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, frozen

from hardpoint.errors import ConfigError
from hardpoint.rpc.network.keys import KeyPair

LARGEST = 4096
LENGTH = 40
"""Characters of a key."""
RUN = "run"
"""Has the inode of a file that was made for one run."""
_TRIES = 20
_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC


@frozen
class JoinKeys:
    """The keys of one group of hosts."""

    leader: KeyPair
    follower: KeyPair

    @classmethod
    def make(cls) -> JoinKeys:
        """Make new ones."""
        return cls(KeyPair.make(), KeyPair.make())

    def shared_secret(self) -> bytes:
        """Return what seals texts of the group: 32 bytes that follow from both secrets."""
        text = self.leader.secret + self.follower.secret
        return hashlib.sha256(text.encode()).digest()


@define(eq=False)
class RunFile:
    """A key file that was made for one run. Its maker holds a lock on it; whoever finds it without
    knows that the maker is gone, and its keys open nothing any more.
    """

    path: Path
    _descriptor: int

    def remove(self) -> None:
        """Remove it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(descriptor)


def write(path: Path) -> JoinKeys:
    """Make new keys and put them into a new file for this user alone, which stays. Raises
    FileExistsError.
    """
    keys = JoinKeys.make()
    os.close(_written(path, keys, for_run=False))
    return keys


def write_for_run(path: Path) -> tuple[JoinKeys, RunFile]:
    """Make new keys and a new file of them that ends with this run. Raises FileExistsError."""
    keys = JoinKeys.make()
    return keys, RunFile(path, _written(path, keys, for_run=True))


def _written(path: Path, keys: JoinKeys, *, for_run: bool) -> int:
    data: dict[str, Any] = {
        name: {"public": pair.public, "secret": pair.secret}
        for name, pair in (("leader", keys.leader), ("follower", keys.follower))
    }
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if for_run:
            with suppress(OSError):  # no locks on this file system: then it is as one that stays
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                data[RUN] = os.fstat(descriptor).st_ino
        os.write(descriptor, json.dumps(data).encode())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def left_over(path: Path, *, remove: bool = False) -> bool:
    """Whether a file was made for a run whose maker is gone; remove it then, if so wanted. A copy
    of such a file is none: it has another inode.
    """
    try:
        descriptor = os.open(path, (os.O_RDWR if remove else os.O_RDONLY) | _SAFELY)
    except OSError:
        return False
    try:
        made = os.fstat(descriptor)
        if not stat.S_ISREG(made.st_mode) or made.st_uid != os.geteuid():
            return False
        if json.loads(os.read(descriptor, LARGEST))[RUN] != made.st_ino:
            return False
        _lock(descriptor, tries=_TRIES if remove else 1)
        if remove and path.stat().st_ino == made.st_ino:
            path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError, KeyError):
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int, tries: int) -> None:
    """Lock what is being looked at; others who look have it for a moment only. Raises OSError."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if tries > 1 else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.01)
        else:
            return


def read(path: Path) -> JoinKeys:
    """Read them. Raises ConfigError for a file that others may read, or that holds no keys."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    except OSError as error:
        raise ConfigError(f"the key file {str(path)!r} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"the key file {str(path)!r} is no regular file")
        if found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise ConfigError(
                f"the key file {str(path)!r} is open to others (mode {found.st_mode & 0o777:o}, "
                f"owner {found.st_uid}): it must be this user's, with mode 600"
            )
        data = os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)
    try:
        pairs = json.loads(data)
        leader, follower = (
            KeyPair(str(pairs[name]["public"]), str(pairs[name]["secret"]))
            for name in ("leader", "follower")
        )
    except (ValueError, TypeError, KeyError):
        leader = follower = KeyPair("", "")
    texts = (leader.public, leader.secret, follower.public, follower.secret)
    if any(len(text) != LENGTH or not text.isascii() for text in texts):
        raise ConfigError(f"the key file {str(path)!r} holds no keys of this program")
    return JoinKeys(leader, follower)


def read_or_write(path: Path) -> tuple[JoinKeys, RunFile | None]:
    """Read the keys, or make them for this run; return them, and the file if it was made. What a
    killed maker left is made anew.
    """
    left_over(path, remove=True)
    try:
        return write_for_run(path)
    except FileExistsError:
        return read(path), None
    except OSError as error:
        raise ConfigError(f"the key file {str(path)!r} cannot be written: {error}") from error


def awaited(path: Path, seconds: float) -> JoinKeys:
    """Read the keys as soon as they are there: who makes them may not have begun yet, or another
    one's that was killed may still be there.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            if not left_over(path):
                return read(path)
            late = ConfigError(
                f"the key file {str(path)!r} is left over of a process that is gone, and nobody "
                f"has made another for {seconds:g} s: start the leader"
            )
        except ConfigError as error:
            late = error
            if path.exists() and path.stat().st_size:
                raise
        if time.monotonic() >= until:
            raise late
        time.sleep(0.05)
