"""How fast this machine reads memory: what no engine can decode faster than."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import statistics
import threading
import time

SIZE = 256 << 20
"""Bytes that each thread reads: more than any cache holds."""
TIMES = 5


def read_bandwidth(threads: int, size: int = SIZE) -> float:
    """Return the bytes a second that so many threads read together: the median of some times.

    Each looks with ``memchr`` for a byte that is not in its own memory; the C library does that
    with the widest loads there are.
    """
    memories = [_filled(size) for _ in range(threads)]
    look = ctypes.CDLL(None).memchr
    look.restype, look.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    views = [(ctypes.c_char * size).from_buffer(memory) for memory in memories]
    seconds = []
    for _ in range(TIMES):
        workers = [
            threading.Thread(target=look, args=(ctypes.addressof(view), 2, size)) for view in views
        ]
        begin = time.perf_counter()
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        seconds.append(time.perf_counter() - begin)
    del views
    return threads * size / statistics.median(seconds)


def _filled(size: int) -> mmap.mmap:
    """Return memory of its own pages, none of which is the page of zeros that all share; large ones
    where Linux gives them to who asks: through small ones memory is read more slowly.
    """
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = b"\x01" * min(size, 1 << 20)
    for start in range(0, size, len(block)):
        memory[start : start + len(block)] = block[: size - start]
    return memory
