"""The name of a new plugin, and the names that follow from it."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import MappingProxyType

from attrs import frozen
from hardpoint import discovery
from hardpoint.discovery import Plugin

from hardpoint_scaffold.errors import PluginNameError

SPELLING = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
LONGEST = 24
"""Characters of a name: it becomes part of file names, class names and lines of code."""

OURS: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"hardpoint-{name}" for name in ("cpu", "cuda", "rocm", "xpu", "tpu", "dummy")},
        **{name: f"hardpoint-{name}" for name in ("ray", "uniproc", "multiproc")},
        **{name: f"hardpoint-{name}" for name in ("engine", "runtime", "conformance", "scaffold")},
        "uni": "hardpoint-uniproc",
        "mp": "hardpoint-multiproc",
        "ray_legacy": "hardpoint-ray",
        "external_launcher": "hardpoint-external-launcher",
    }
)
"""Names of Hardpoint's own plugins and distributions, installed or not -> the distribution."""

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "any": "offers that name 'any' are good for every platform",
        "auto": "in the configuration it leaves the choice to Hardpoint",
        "none": "in the configuration it stands for no value",
        "disable": "plugins.disable is a key of the configuration",
        "strict": "plugins.strict is a key of the configuration",
        "provider": "plugins.provider is a key of the configuration",
        "hardpoint": "it would be taken for Hardpoint itself",
    }
)
"""Words that mean something else where plugins are named -> what."""


@frozen(kw_only=True)
class PluginNames:
    """What one plugin is called in each place: ``acme-mp`` in the configuration, distribution
    ``hardpoint-acme-mp``, package ``hardpoint_acme_mp``, classes ``AcmeMp...``.
    """

    kind: str
    name: str

    @property
    def distribution(self) -> str:
        """The distribution, and the project's folder."""
        return f"hardpoint-{self.name}"

    @property
    def package(self) -> str:
        """The import package."""
        return self.distribution.replace("-", "_")

    @property
    def prefix(self) -> str:
        """What the names of classes begin with."""
        return "".join(part.capitalize() for part in re.split("[-_]", self.name))


def checked_names(kind: str, name: str) -> PluginNames:
    """Return the names of a new plugin of ``kind`` (``platform``, ``executor``).

    Reads the metadata of what is installed and imports none of it. Raises PluginNameError for a
    name that is malformed, reserved or taken.
    """
    for reason in _reasons_against(kind, name):
        raise PluginNameError(f"{kind} {name!r}: {reason}")
    names = PluginNames(kind=kind, name=name)
    for reason in _claims(names):
        raise PluginNameError(f"{kind} {name!r}: {reason} Choose another name.")
    return names


def _reasons_against(kind: str, name: str) -> Iterator[str]:
    if not SPELLING.fullmatch(name):
        hint = _respelt(name)
        yield (
            "a name is made of lower-case letters and digits, begins with a letter, and may have "
            f"single hyphens or underscores inside.{f' Did you mean {hint!r}?' if hint else ''}"
        )
    if len(name) > LONGEST:
        yield f"the name has {len(name)} characters; {LONGEST} are the most."
    if name in MEANINGS:
        yield f"the name is reserved: {MEANINGS[name]}. Choose another name."
    bare = name.replace("-", "_")
    if keyword.iskeyword(bare) or keyword.issoftkeyword(bare):
        yield "the name is a keyword of Python, which no module can be called. Choose another name."
    if bare in sys.stdlib_module_names:
        other = f"{name}-{'unit' if kind == 'platform' else 'workers'}"
        yield (
            "the name is that of a module of Python's standard library, for which it would be "
            f"taken. Choose another name: {other!r}, say."
        )
    ours = {discovery.normalized(key): value for key, value in OURS.items()}
    if (owner := ours.get(discovery.normalized(name))) is not None:
        yield f"the name is reserved for {owner}, of Hardpoint itself. Choose another name."


def _claims(names: PluginNames) -> Iterator[str]:
    """Yield what already has one of the names."""
    for plugin in discovery.find():
        if discovery.normalized(plugin.name) == discovery.normalized(names.name):
            yield f"{_shown(plugin)} is installed."
    try:
        version = metadata.version(names.distribution)
    except metadata.PackageNotFoundError:
        pass
    else:
        yield f"the distribution {names.distribution} {version} is installed."
    try:
        spec = importlib.util.find_spec(names.package)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        yield f"there is a package {names.package} already, in {where}."


def _shown(plugin: Plugin) -> str:
    return f"{plugin.kind} {plugin.name!r} of {plugin.provider}"


def _respelt(name: str) -> str:
    """Return the nearest name that is well formed, or nothing."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    if words[:1] == ["hardpoint"]:
        words = words[1:]
    hint = "-".join(words)
    return hint if SPELLING.fullmatch(hint) and len(hint) <= LONGEST else ""
