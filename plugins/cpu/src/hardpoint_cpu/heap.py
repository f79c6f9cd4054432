"""The C library's heap while weights are loaded, so that what loading took is given back.

glibc maps large blocks for themselves, and unmaps them when they are freed; but the first that is
freed raises the size from which on it does so, up to 32 MiB (malloc/malloc.c, "dynamic mmap
threshold"). The next ones lie in the heap, between small blocks that stay, and keep its pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""``mallopt``'s parameters, as malloc.h numbers them."""
LOADING = {MMAP_THRESHOLD: 128 << 10, TRIM_THRESHOLD: 128 << 10}
"""Bytes: what glibc begins with; once it is set it stays."""
SERVING = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}
"""What glibc's own raising ends at, so that torch's operations do not map memory each time."""
OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_lock = threading.Lock()
_loading = 0


@contextlib.contextmanager
def large_blocks_mapped(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Have large blocks mapped for themselves as long as the ``with`` block runs; of several at
    once, until the last ends. Does nothing without glibc, or where a variable sets the heap.
    """
    global _loading  # noqa: PLW0603 - the heap is the process's, whoever loads
    tunes = getattr(ctypes.CDLL(None), "mallopt", None)
    if tunes is None or any(name in environ for name in OWN_SETTINGS):
        yield
        return
    with _lock:
        _loading += 1
        _set(tunes, LOADING)
    try:
        yield
    finally:
        with _lock:
            _loading -= 1
            if not _loading:
                _set(tunes, SERVING)


def _set(tunes: ctypes._NamedFuncPointer, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        tunes(parameter, value)
