"""Questions that only a fresh process can answer: what an import brings, what a validation starts.

``ask`` runs this module as a program; the functions below are what it can be asked.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hardpoint_conformance.contract import ContractError

SECONDS = 120
_ENVIRONMENT = dict(os.environ)
"""The variables before any plugin was imported here, which might have set some."""
QUESTIONS = (
    "imported",
    "imported_by",
    "validated",
    "probe_seconds",
    "resolved_classes",
    "preloaded",
)


def ask(question: str, *arguments: object) -> dict[str, Any]:
    """Run a question in a fresh interpreter; return its answer. Raises ContractError with what the
    process said if it failed.
    """
    done = subprocess.run(  # noqa: S603 - this interpreter, this module
        [sys.executable, "-m", __name__, question, json.dumps(arguments, default=str)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env={**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise ContractError(
            f"\n  in a fresh process:  {lines[-1]}\n\n" + "\n".join(f"    {line}" for line in lines)
        )
    last = "".join(done.stdout.splitlines()[-1:])
    try:
        answer: dict[str, Any] = json.loads(last)
    except ValueError:
        raise ContractError(
            f"\n  in a fresh process:  it ended before it had answered; its last line was {last!r}"
        ) from None
    return answer


def imported(kind: str, name: str) -> dict[str, Any]:
    """Load a plugin; say why it cannot be."""
    from hardpoint.errors import HardpointError
    from hardpoint.registry import Registry

    try:
        Registry.discover().load(kind, name)
    except HardpointError as error:
        return {"error": str(error)}
    return {"error": None}


def imported_by(module: str) -> dict[str, Any]:
    """Import a light module, before and after hardpoint; say what came with it."""
    importlib.import_module("hardpoint.hookspecs")
    importlib.import_module("hardpoint.records")
    before, variables = set(sys.modules), dict(os.environ)
    importlib.import_module(module)
    tops = {name.split(".")[0] for name in set(sys.modules) - before}
    importlib.reload(sys.modules[module])
    changed = "changed os.environ" if variables != dict(os.environ) else ""
    known = {*sys.stdlib_module_names, "hardpoint", "hardpoint_conformance"}
    return {"foreign": sorted(tops - known), "named": _named_by(module), "said": changed}


def validated(kind: str, name: str, settings: dict[str, object]) -> dict[str, Any]:
    """Discover, select, describe and check; say what that left in this process."""
    from hardpoint_conformance.probe import find_probe
    from hardpoint_conformance.watching import Traces

    variables, before = dict(os.environ), set(sys.modules)
    threads = set(threading.enumerate())
    _validate(kind, name, settings)
    modules = sorted({each.split(".")[0] for each in set(sys.modules) - before})
    return {
        "modules": modules,
        "devices": sorted(_open_devices()),
        "children": sorted(Traces.now().children),
        "threads": [t.name for t in set(threading.enumerate()) - threads if t.is_alive()],
        "environment": sorted({*variables.items()} ^ {*os.environ.items()}),
        "initialised": find_probe(name).initialised(),
    }


def probe_seconds(kind: str, name: str, settings: dict[str, object]) -> dict[str, Any]:
    """Ask for the verdict five times, of a registry of its own each."""
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry

    seconds = []
    for _ in range(5):
        registry = Registry.discover(load_config(overrides=dict(settings), environ={}))
        registry.load(kind, name)
        if kind == "platform":
            registry.platform(name)
        started = time.perf_counter()
        registry.verdict(kind, name, named=True)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def resolved_classes(name: str, settings: dict[str, object]) -> dict[str, Any]:
    """Import the classes of a platform; say what they lack and misspell."""
    from hardpoint.model_runner import ModelRunner
    from hardpoint.platform import Platform
    from hardpoint.references import resolve_class
    from hardpoint.worker import Worker

    platform = _platform(name, settings)
    contracts: dict[str, type] = {"worker_class": Worker, "model_runner_class": ModelRunner}
    found = {
        "platform": {
            "name": type(platform).__qualname__,
            "abstract": [],
            "misspelt": near_misses(type(platform), Platform),
        }
    }
    for key, contract in contracts.items():
        kind: type = resolve_class(getattr(platform, key), contract)
        found[key] = {
            "name": kind.__qualname__,
            "abstract": sorted(getattr(kind, "__abstractmethods__", ())),
            "misspelt": near_misses(kind, contract),
        }
    return found


def preloaded(name: str, settings: dict[str, object]) -> dict[str, Any]:
    """Import what a nursery may import; say whether that initialised a device."""
    from hardpoint_conformance.probe import find_probe

    for module in _platform(name, settings).preload:
        importlib.import_module(module)
    return {"devices": sorted(_open_devices()), "initialised": find_probe(name).initialised()}


def _named_by(module: str) -> list[str]:
    """Return the top-level names that the source of a module imports itself."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return sorted(names)


def near_misses(kind: type, contract: type) -> list[str]:
    """Return methods of ``kind`` that override nothing and are spelt nearly like one that it has
    of ``contract``, or of a class between (a toolkit's ``make_...``), and does not override.
    """
    found = []
    for place, owner in enumerate(kind.__mro__):
        if owner is contract:
            break
        bases = kind.__mro__[place + 1 :]
        known = {name for base in bases for name in vars(base) if not name.startswith("_")}
        for name, value in vars(owner).items():
            if name in known or name.startswith("_") or not callable(value):
                continue
            near = get_close_matches(name, known - set(vars(owner)), 1, 0.85)
            if near and _first(kind, near[0]) is _first(bases[0], near[0]):
                found.append(f"{owner.__name__}.{name} (is {near[0]} meant?)")
    return sorted(found)


def _first(kind: type, name: str) -> object:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _platform(name: str, settings: dict[str, object]) -> Any:
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry

    overrides = {"platform": name, **settings}
    return Registry.discover(load_config(overrides=overrides, environ={})).platform(name)


def _validate(kind: str, name: str, settings: dict[str, object]) -> None:
    from hardpoint.config import resolution
    from hardpoint.config.loading import load_config
    from hardpoint.registry import Registry
    from hardpoint.selection import select_executor, select_platform

    from hardpoint_conformance.unchanged import unchanged

    named = {"platform": name} if kind == "platform" else {"platform": "dummy", "executor": name}
    config = load_config(overrides={**named, **settings}, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    with unchanged(config, "hardpoint_configure"):
        configured = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(configured, platform)
    placement = platform.placement(config)
    platform.limits(config)
    platform.environment(config, placement)
    platform.fork_safe()
    if kind == "executor":
        select_executor(registry, config, platform)
    config = resolution.structure_plugins(config, registry)
    tuple(platform.check(config))


def _open_devices() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("/dev/"):
            found.add(target)
    return found


if __name__ == "__main__":
    if sys.argv[1] not in QUESTIONS:
        raise SystemExit(f"no such question: {sys.argv[1]}")
    sys.stdout.write("\n" + json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))) + "\n")
