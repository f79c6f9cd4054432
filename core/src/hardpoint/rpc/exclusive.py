"""Who holds an exclusive platform in this process.

Some runtimes serve one engine per process. That is a fact of the process, so the record of it is
the one module-level state here; it holds nothing but names.
"""

from __future__ import annotations

import os
import threading

from hardpoint.errors import UnsupportedError

_lock = threading.Lock()
_held: dict[tuple[int, str], object] = {}


class ExclusiveClaim:
    """The right to run a platform in this process; given back by :meth:`release`.

    Taken by the worker's host when it is built. Raises UnsupportedError if an engine that is still
    alive holds it.
    """

    def __init__(self, platform: str) -> None:
        self._key = (os.getpid(), platform)  # a forked child starts with nothing held
        with _lock:
            if self._key in _held:
                raise UnsupportedError(
                    "a second engine in one process",
                    f"platform {platform!r}",
                    reason="its runtime is exclusive and an engine here holds it",
                    hint="Shut that engine down first, or start this one in another process.",
                )
            _held[self._key] = self

    def release(self) -> None:
        """Give the platform back. Idempotent."""
        with _lock:
            if _held.get(self._key) is self:
                del _held[self._key]
