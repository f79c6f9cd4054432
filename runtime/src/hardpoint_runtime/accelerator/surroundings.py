"""What a probe may look at, and what it saw: values, so that tests make up a machine. No torch."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen
from hardpoint.records import Device


def torch_build() -> Mapping[str, str | None]:
    """Return what the installed torch was built for: the texts of its ``version.py`` by name, None
    for what it was not built with; empty where there is no torch. Imports nothing.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or type(value.value) is str):
            found |= {each.id: value.value for each in targets if isinstance(each, ast.Name)}
    return found


@frozen(kw_only=True)
class Surroundings:
    """What detection may look at: files below ``root``, the environment, and the build of torch."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    torch: Callable[[], Mapping[str, str | None]] = torch_build

    def without_torch(self, key: str, runtime: str) -> tuple[str, ...]:
        """Return why the installed torch computes on no device of ``runtime``, and the way out;
        nothing where its build has ``key``.
        """
        build, way_out = self.torch(), f"install a build of it for {runtime} (pytorch.org)"
        if not build:
            return (f"the package torch is not installed: {way_out}",)
        if build.get(key) is None:
            installed = build.get("__version__")
            return (f"the installed torch ({installed}) is not built for {runtime}: {way_out}",)
        return ()

    def read(self, path: str) -> str | None:
        """Return a small file's text without its ends; None if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
        except OSError:
            return None

    def has(self, path: str) -> bool:
        """Whether there is such a file, folder or device."""
        return (self.root / path).exists()


@frozen(kw_only=True)
class Sighting:
    """The devices that a process may use, in their logical order, and what was noticed.

    ``features`` maps what kernels and data types depend on to whether all of the devices have it,
    or to what they have: the default type follows it, and the verdict tells it.
    ``reasons`` say why there are none (one a cause); ``notes`` what a person should know of those
    that are there.
    """

    devices: tuple[Device, ...] = ()
    features: Mapping[str, object] = field(factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
