"""The worker methods that the benchmarks call, offered as any extension offers its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExtensionRecord

from hardpoint_engine.bench.launching import METHOD, NAME, PROCESS, WORK


@hookimpl
def hardpoint_extension() -> ExtensionRecord:
    """Say who it is."""
    return ExtensionRecord(name=NAME, api=(1, 0))


@hookimpl
def hardpoint_worker_methods() -> Mapping[str, Callable[..., object]]:
    """Offer the methods; called in every worker."""
    return {METHOD: receive, WORK: work, PROCESS: process_id}


def receive(worker: object, payload: Any) -> int:
    """Return the last byte of a payload."""
    return int(payload[-1])


def work(worker: object, seconds: float) -> tuple[int, int]:
    """Be busy for so long; return when that began and ended, in ns of the host's own clock."""
    begin = now = time.perf_counter_ns()
    end = begin + int(seconds * 1e9)
    while now < end:
        now = time.perf_counter_ns()
    return begin, now


def process_id(worker: object) -> int:
    """Return the number of the worker's process."""
    return os.getpid()
