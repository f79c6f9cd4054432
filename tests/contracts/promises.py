"""The other promises, each with a number of its own: toolkit, engine, kit. Their public parts, read
off the code; what only adds to them is not recorded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import version

from attrs import frozen
from describe import Lines, class_lines, signature

TOOLKIT = (
    "hardpoint_runtime.device:DeviceOps", "hardpoint_runtime.device:TorchDeviceOps",
    "hardpoint_runtime.device:MemoryInfo", "hardpoint_runtime.operations:Operations",
    "hardpoint_runtime.quantization:Quantization", "hardpoint_runtime.quantization:PackedForm",
    "hardpoint_runtime.quantization:PackedPart", "hardpoint_runtime.quantization:Place",
    "hardpoint_runtime.quantization:Piece", "hardpoint_runtime.batch.columns:Column",
)  # fmt: skip
COLLABORATORS = ("hardpoint_runtime.worker:TorchWorker",
                 "hardpoint_runtime.model_runner:TorchModelRunner")  # fmt: skip
"""Of which the ``make_*`` methods are promised: each builds one part."""


@frozen(kw_only=True)
class Promise:
    """``number()`` of the code, as text, and what it promises, ``described()``."""

    number: Callable[[], str]
    described: Callable[[], Lines]


def _of(references: tuple[str, ...]) -> Lines:
    lines: Lines = {}
    for reference in references:
        module, _, name = reference.partition(":")
        lines |= class_lines(f"{module}.{name}", getattr(importlib.import_module(module), name))
    return lines


def _toolkit() -> Lines:
    # Which function an operation is by default is the toolkit's affair.
    lines = {
        name: f"{line.partition(' = ')[0]} = ..." if "Operations." in name else line
        for name, line in _of(TOOLKIT).items()
    }
    for reference in COLLABORATORS:
        module, _, name = reference.partition(":")
        kind = getattr(importlib.import_module(module), name)
        lines |= {
            f"{module}.{name}.{made}": f"method {signature(getattr(kind, made))}"
            for made in dir(kind) if made.startswith("make_")
        }  # fmt: skip
    return lines


def _exported(package: str) -> Lines:
    """Return every class that a package exports, by the name that it is imported by."""
    module = importlib.import_module(package)
    lines: Lines = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type) and value.__module__.startswith(package):
            lines |= class_lines(f"{package}.{name}", value)
    return lines


def _kit() -> Lines:
    """Return the probe, the oracle, and that there are the suites; tests may come and go."""
    base = importlib.import_module("hardpoint_conformance.suite").Suite
    exported = importlib.import_module("hardpoint_conformance")
    suites = [name for name in exported.__all__ if issubclass(getattr(exported, name), base)]
    tests = tuple(f"hardpoint_conformance.{name}." for name in suites)
    lines = {
        name: "suite" if f"{name}." in tests else line
        for name, line in _exported("hardpoint_conformance").items() if not name.startswith(tests)
    }  # fmt: skip
    return lines | {"hardpoint_conformance.Suite.of": f"class method {signature(base.of.__func__)}"}


def _api(package: str) -> Callable[[], str]:
    return lambda: "{}.{}".format(*importlib.import_module(package).API)


PROMISES: Mapping[str, Promise] = {
    "toolkit": Promise(number=_api("hardpoint_runtime"), described=_toolkit),
    "engine": Promise(
        number=_api("hardpoint_engine"), described=lambda: _exported("hardpoint_engine")
    ),
    "kit": Promise(
        number=lambda: version("hardpoint-conformance").rpartition(".")[0], described=_kit
    ),
}
