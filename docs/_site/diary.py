"""Writes down a run: every hook and every method of the four contracts, in the order of the calls.

A platform ``diary`` is made of ``dummy``, an executor of ``uni``; both note and pass on. Nothing is
patched: it is a plugin, found by metadata in a folder of its own. ``python diary.py`` prints the
notes as JSON; the page on the lifecycle is drawn from them, and tests compare them with the code.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardpoint import hookspecs
from hardpoint.executor import Executor
from hardpoint.platform import Platform
from hardpoint.records import PlatformRecord
from hardpoint.worker import Worker
from hardpoint_dummy.platform import DummyPlatform
from hardpoint_dummy.worker import DummyWorker
from hardpoint_uniproc.executor import UniProcExecutor

NOTES: list[tuple[str, str, str]] = []
"""(process, kind, name) of each call; kind is hook, platform, executor or worker."""

WORKER_THREAD = "hardpoint-uni"
"""Where `uni` has its worker; on every other executor that is a process of its own."""
BACKEND = ("start_workers", "probe_health", "stop_workers")
QUIET = (
    "support",
    "require",
    "get_model_runner",
    "get_model",
    "end_collectives",
    "context",
    "shown",
)


def note(kind: str, name: str) -> None:
    """Write one call down, once where it repeats."""
    worker = threading.current_thread().name == WORKER_THREAD
    entry = ("worker" if worker else "driver", kind, name)
    if not NOTES or NOTES[-1] != entry:
        NOTES.append(entry)


def noted(
    kind: str, contract: type, names: tuple[str, ...] | None = None
) -> Callable[[type], type]:
    """Return a class decorator: the contract's public methods are noted, then done."""

    def decorate(cls: type) -> type:
        for name, _ in inspect.getmembers(contract, inspect.isfunction):
            if name.startswith("_") or name in QUIET or (names and name not in names):
                continue
            setattr(cls, name, _noting(kind, name, getattr(cls, name)))
        return cls

    return decorate


def _noting(kind: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(kind, name)
        return method(*args, **kwargs)

    return call


@noted("platform", Platform)
class DiaryPlatform(DummyPlatform):
    """``dummy``, noted."""

    name = "diary"
    worker_class = "diary:DiaryWorker"


@noted("worker", Worker)
class DiaryWorker(DummyWorker):
    """``dummy``'s worker, noted."""


@noted("executor", Executor, BACKEND)
class DiaryExecutor(UniProcExecutor):
    """``uni``, noted."""


def _hook(name: str, specification: Callable[..., Any]) -> Callable[..., Any]:
    takes_none = not inspect.signature(specification).parameters

    def offered() -> Any:
        note("hook", name)
        if name == "hardpoint_platform":
            return PlatformRecord(
                name="diary", api=(2, 0), platform="diary:DiaryPlatform",
                settings="hardpoint_dummy.settings:DummySettings",
            )  # fmt: skip
        mapping = name in ("hardpoint_worker_env", "hardpoint_worker_methods")
        single = name in (
            "hardpoint_worker",
            "hardpoint_model_runner",
            "hardpoint_executor",
            "hardpoint_extension",
        )
        return None if single else {} if mapping else ()

    def announced() -> None:
        note("hook", name)

    announces = not takes_none and inspect.signature(specification).return_annotation == "None"
    return hookspecs.hookimpl(announced if announces else offered)


HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("hardpoint_"))
"""Every hook, in the order of ``hookspecs.py``."""
for _name in HOOKS:
    if _name not in ("hardpoint_executor", "hardpoint_extension"):  # asked of other groups
        globals()[_name] = _hook(_name, getattr(hookspecs, _name))


def run() -> list[tuple[str, str, str]]:
    """Start an engine, answer one prompt, sleep and wake, end it; return the notes."""
    from hardpoint_engine import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "hardpoint_diary-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hardpoint-diary\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[hardpoint.platforms]\ndiary = diary\n")
        sys.path.append(folder)
        llm = LLM(platform="diary", executor=DiaryExecutor, load_format="dummy", num_kv_blocks=None)
        llm.generate(["one"], SamplingParams(max_tokens=2, temperature=0))
        llm.sleep(1)
        llm.wake_up()
        llm.core.executor.check_health()
        llm.shutdown()
        sys.path.remove(folder)
    return NOTES


if __name__ == "__main__":
    sys.modules["diary"] = sys.modules["__main__"]  # the plugin of that name is this module
    print(json.dumps(run()))
