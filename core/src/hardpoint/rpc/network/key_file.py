"""The file by which leader and followers know each other, before anything else is known.

It holds a pair of keys for either side. All other keys are made for one run and handed over by the
connection that these two protect.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path

from attrs import frozen

from hardpoint.errors import ConfigError
from hardpoint.rpc.network.keys import KeyPair

LARGEST = 4096
LENGTH = 40
"""Characters of a key."""


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


def write(path: Path) -> JoinKeys:
    """Make new keys and put them into a new file for this user alone. Raises FileExistsError."""
    keys = JoinKeys.make()
    data = {
        name: {"public": pair.public, "secret": pair.secret}
        for name, pair in (("leader", keys.leader), ("follower", keys.follower))
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(data, file)
    return keys


def read(path: Path) -> JoinKeys:
    """Read them. Raises ConfigError for a file that others may read, or that holds no keys."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


def read_or_write(path: Path) -> tuple[JoinKeys, bool]:
    """Read the keys, or make them; return them, and whether they were made."""
    try:
        return write(path), True
    except FileExistsError:
        return read(path), False
    except OSError as error:
        raise ConfigError(f"the key file {str(path)!r} cannot be written: {error}") from error


def awaited(path: Path, seconds: float) -> JoinKeys:
    """Read the keys as soon as they are there; the leader may not have written them yet."""
    until = time.monotonic() + seconds
    while True:
        try:
            return read(path)
        except ConfigError:
            empty = not path.exists() or path.stat().st_size == 0
            if not empty or time.monotonic() >= until:
                raise
        time.sleep(0.05)
