"""Compiled programs kept on disk, so that a second start compiles nothing.

JAX keeps its persistent cache in settings of the process. They are set while stages are compiled
and put back afterwards, under a lock, so that two engines with two folders do not meet, and nothing
else of the process is cached here. A file of the cache is a program: the folder belongs to the user
alone, and one that others may write to is refused.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from attrs import define
from hardpoint.errors import ConfigError
from hardpoint.records import Problem
from jax.experimental.compilation_cache import compilation_cache as jax_cache

HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
COMPILED = "/jax/core/compile/backend_compile_duration"
_LOCK = threading.Lock()
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@define
class Compilations:
    """How many programs were asked for, and how many of them came from the cache."""

    asked: int = 0
    cached: int = 0

    @property
    def compiled(self) -> int:
        """How many were compiled."""
        return self.asked - self.cached


def cache_folder(setting: str, environ: dict[str, str] | None = None) -> Path | None:
    """Return the folder that ``plugins.tpu.compilation_cache`` means; None for no cache."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    known = dict(os.environ) if environ is None else environ
    home = known.get("XDG_CACHE_HOME") or str(Path(known.get("HOME", "~")).expanduser() / ".cache")
    return Path(home) / "hardpoint" / "xla"


@contextmanager
def counted_compilations(folder: Path | None) -> Iterator[Compilations]:
    """Compile within, on this thread, with the cache in ``folder``, and count. Raises ConfigError
    for a folder that cannot be made or that others may write to.
    """
    counts = Compilations()
    thread = threading.get_ident()

    def heard(event: str, **_: str | int) -> None:
        if threading.get_ident() == thread and event == HIT:
            counts.cached += 1

    def took(event: str, duration_secs: float, **_: str | int) -> None:
        if threading.get_ident() == thread and event == COMPILED:
            counts.asked += 1

    with _LOCK:
        before = _set(folder)
        jax.monitoring.register_event_listener(heard)
        jax.monitoring.register_event_duration_secs_listener(took)
        try:
            yield counts
        finally:
            jax.monitoring.unregister_event_listener(heard)
            jax.monitoring.unregister_event_duration_listener(took)
            _restore(before)


def _set(folder: Path | None) -> dict[str, object]:
    wanted: dict[str, object] = dict(_SETTINGS)
    if folder is None:
        wanted = {"jax_enable_compilation_cache": False}
    else:
        _own(folder)
        wanted["jax_compilation_cache_dir"] = str(folder)
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
    return before


def _restore(before: dict[str, object]) -> None:
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def _own(folder: Path) -> None:
    """Make the folder, for its owner alone; refuse one of somebody else's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise _problem(folder, f"cannot be made: {error.strerror or error}") from error
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _problem(folder, "others may write to it, and what is in it is executed")


def _problem(folder: Path, message: str) -> ConfigError:
    problem = Problem(
        key="plugins.tpu.compilation_cache",
        value=str(folder),
        message=f"{message}.",
        way_out="Name a folder of your own, or none.",
    )
    return ConfigError(str(problem), problems=(problem,))
