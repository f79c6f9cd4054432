"""What the installed distributions' metadata says of plugins. Reads files; imports no plugin."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

_logger = logging.getLogger("hardpoint.discovery")

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "platform": "hardpoint.platforms",
        "executor": "hardpoint.executors",
        "extension": "hardpoint.extensions",
        "command": "hardpoint.commands",
    }
)
"""Kind of plugin -> entry point group."""


@frozen(kw_only=True)
class ResolvedPlugin:
    """What a worker needs to load exactly the driver's plugin: plain data, sent at start."""

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: str


@frozen(kw_only=True)
class Plugin:
    """One plugin and what became of it.

    ``state`` is ``found`` (not loaded so far), ``loaded``, ``disabled`` (by the configuration),
    ``refused`` (built for another core), ``failed`` (it raised or has the wrong shape) or
    ``conflict`` (another distribution claims the name); ``reason`` says more where there is more to
    say. ``error`` is what it raised, always the same object.
    """

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: str
    requires: tuple[str, ...] = field(default=(), repr=False)
    state: str = "found"
    reason: str = ""
    record: Any = field(default=None, eq=False, repr=False)
    module: Any = field(default=None, eq=False, repr=False)
    error: BaseException | None = field(default=None, eq=False, repr=False)

    @property
    def provider(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}"

    @property
    def label(self) -> str:
        """The plugin as people need it to act: kind, name, distribution, version, entry point."""
        return (
            f"{self.kind} {self.name!r} of {self.provider} "
            f"(entry point {self.name} = {self.entry_point} in {GROUPS[self.kind]})"
        )

    @property
    def resolved(self) -> ResolvedPlugin:
        """What a worker needs to load the same."""
        return ResolvedPlugin(
            kind=self.kind,
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.entry_point,
        )


def normalized(distribution: str) -> str:
    """Return a distribution's name as the packaging rules compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def find(path: Sequence[str] | None = None) -> tuple[Plugin, ...]:
    """Return every entry point of the Hardpoint groups on ``path`` (default: ``sys.path``).

    Called in the driver and in workers. The same entry point found twice is one. A distribution
    does not count that an earlier path entry shadows, as it would not be imported either, nor one
    that an interrupted upgrade left beside another of its name.
    """
    importlib.invalidate_caches()
    # Python 3.11 does not pass that on to this one; an instance, as it is no class method there.
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    candidates = [
        (distribution, _headers(distribution), text)
        for distribution in _distributions(path)
        if (text := _entry_points_text(distribution)) is not None
    ]
    namesakes = Counter(normalized(headers["Name"][0]) for _, headers, _ in candidates)
    found: dict[tuple[str, ...], Plugin] = {}
    for distribution, headers, text in candidates:
        first = _first(headers["Name"][0], path) or distribution
        if first.locate_file("") != distribution.locate_file(""):
            continue
        if namesakes[normalized(headers["Name"][0])] > 1 and not _same(first, headers, text):
            continue
        for kind, name, value in _entries(text):
            key = (kind, name, value, normalized(headers["Name"][0]))
            found.setdefault(
                key,
                Plugin(
                    kind=kind,
                    name=name,
                    entry_point=value,
                    distribution=headers["Name"][0],
                    version=headers["Version"][0],
                    requires=tuple(headers["Requires-Dist"]),
                ),
            )
    kinds = list(GROUPS)

    def order(each: Plugin) -> tuple[int, str, str, str]:
        return kinds.index(each.kind), each.name, each.distribution, each.entry_point

    return tuple(sorted(found.values(), key=order))


def _distributions(path: Sequence[str] | None) -> Iterator[importlib.metadata.Distribution]:
    if path is None:
        return iter(importlib.metadata.distributions())
    return iter(importlib.metadata.distributions(path=list(path)))


def _entry_points_text(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the entry points' file if it has a group of ours; most distributions end here."""
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError) as error:
        where = distribution.locate_file("")
        _logger.warning("a distribution in %s has unreadable entry points: %s", where, error)
        return None
    return text if text and "[hardpoint." in text else None


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, value) for the lines of our groups; broken lines yield what they have, so
    that loading can name them.
    """
    kinds = {group: kind for kind, group in GROUPS.items()}
    kind: str | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            kind = kinds.get(line.strip("[] "))
        elif kind is not None and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield kind, name.strip(), value.partition("[")[0].strip()  # less the extras


def _headers(distribution: importlib.metadata.Distribution) -> dict[str, list[str]]:
    """Return Name, Version and Requires-Dist, by a line scan: a mail parser costs ten times as
    much.
    """
    headers: dict[str, list[str]] = {"Name": [], "Version": [], "Requires-Dist": []}
    try:
        text = distribution.read_text("METADATA")
        if text is None:
            text = distribution.read_text("PKG-INFO") or ""
            headers["Requires-Dist"] = list(distribution.requires or ())
    except (OSError, UnicodeDecodeError):
        text = ""
    for line in text.splitlines():
        if not line:
            break
        key, _, value = line.partition(":")
        if key in headers:
            headers[key].append(value.strip())
    headers["Name"] = headers["Name"] or ["(unnamed distribution)"]
    headers["Version"] = headers["Version"] or ["(no version)"]
    return headers


def _first(name: str, path: Sequence[str] | None) -> importlib.metadata.Distribution | None:
    """Return the distribution that ``importlib.metadata`` finds by its name, which passes over what
    pip was removing when it was interrupted (``~ame-1.0.dist-info``).
    """
    where: dict[str, Any] = {} if path is None else {"path": list(path)}
    return next(iter(importlib.metadata.distributions(name=name, **where)), None)


def _same(
    first: importlib.metadata.Distribution, headers: Mapping[str, Sequence[str]], text: str
) -> bool:
    return _headers(first)["Version"] == headers["Version"] and _entry_points_text(first) == text
