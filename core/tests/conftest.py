"""A folder of distributions made of metadata and a few lines of source, importable for one test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

PLUGIN = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import (
    Change, ExecutorRecord, ExtensionRecord, Offer, Operation, PlatformRecord, Verdict,
)
"""

PLATFORM = """
from hardpoint.capabilities import NOT_YET, YES, Capability
from hardpoint.platform import Platform
from hardpoint.records import Limits, Placement, Verdict

class ThePlatform(Platform):
    name = {name!r}
    worker_class = "{module}.worker:TheWorker"
    model_runner_class = "{module}.runner:TheRunner"
    capabilities = dict.fromkeys(Capability, NOT_YET)
    support_level = "L1"
    probes = 0

    def probe(self):
        type(self).probes += 1
        {probe}
        return Verdict(available={available}, priority={priority}, reason={reason!r})

    def limits(self, config):
        return Limits(dtypes=("float32",), default_dtype="float32")

    def placement(self, config):
        return Placement(num_workers={workers}, num_hosts={hosts}, default_executor={default!r})
"""


class Site:
    """A folder like site-packages. ``path`` is what discovery gets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def path(self) -> list[str]:
        return [str(self.folder)]

    def add(
        self,
        distribution: str,
        version: str = "1.0",
        *,
        entry_points: Mapping[str, Mapping[str, str]] | str = "",
        requires: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        """Install a distribution; ``entry_points`` is kind -> name -> value, or the file's text."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n\nA description\nName: not this\n")
        if not isinstance(entry_points, str):
            entry_points = "".join(
                f"[hardpoint.{kind}s]\n" + "".join(f"{n} = {v}\n" for n, v in group.items())
                for kind, group in entry_points.items()
            )
        (info / "entry_points.txt").write_text(entry_points)
        for name, source in (modules or {}).items():
            self.module(name, source)
        return info

    def module(self, name: str, source: str) -> None:
        """Write a module; its packages are made."""
        *packages, last = name.split(".")
        folder = self.folder
        for package in packages:
            folder /= package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(textwrap.dedent(source))

    def plugin(
        self,
        kind: str,
        name: str,
        record: str = "",
        *,
        source: str = "",
        distribution: str | None = None,
        api: tuple[int, int] = (2, 0),
        entry_point: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = ("hardpoint>=0.1",),
    ) -> str:
        """Install a distribution with one plugin; return its package. ``record`` are more arguments
        of the record, ``source`` more lines of ``plugin.py``.
        """
        distribution = distribution or f"hp-{name}"
        package = distribution.replace("-", "_")
        cls = f"{kind.capitalize()}Record"
        text = PLUGIN + (
            f"@hookimpl\ndef hardpoint_{kind}():\n"
            f"    return {cls}(name={name!r}, api={api!r}, {record})\n"
        )
        self.add(
            distribution,
            version,
            requires=requires,
            entry_points={kind: {name: entry_point or f"{package}.plugin"}},
            modules={f"{package}.plugin": text + textwrap.dedent(source)},
        )
        return package

    def platform(
        self,
        name: str,
        *,
        available: bool = True,
        priority: int = 0,
        reason: str = "as told",
        probe: str = "pass",
        workers: int = 1,
        hosts: int = 1,
        default: str | None = None,
        more: str = "",
        record: str = "",
        **plugin,
    ) -> str:
        """Install a platform; ``probe`` is a line run by its probe, ``more`` lines of its class."""
        package = plugin.get("distribution", f"hp_{name}").replace("-", "_")
        reference = f'platform="{package}.platform:ThePlatform", {record}'
        self.plugin("platform", name, reference, **plugin)
        source = PLATFORM.format(
            name=name, module=package, probe=probe, available=available, priority=priority,
            reason=reason, workers=workers, hosts=hosts, default=default,
        )  # fmt: skip
        self.module(f"{package}.platform", source + textwrap.indent(textwrap.dedent(more), "    "))
        return package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site on ``sys.path``; what it gave is forgotten after the test."""
    before = set(sys.modules)
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    yield made
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]
