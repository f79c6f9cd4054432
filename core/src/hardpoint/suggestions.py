"""Sentences for a name that no plugin has: close matches, what is installed, how to install."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from hardpoint.config.problems import close
from hardpoint.discovery import Plugin, normalized
from hardpoint.errors import PluginNotFoundError
from hardpoint.records import Problem

if TYPE_CHECKING:
    from hardpoint.config import Config

_OURS = {
    "cpu": "hardpoint-cpu",
    "uni": "hardpoint-uniproc",
    "mp": "hardpoint-multiproc",
    "ray": "hardpoint-ray",
    "ray_legacy": "hardpoint-ray",
    "external_launcher": "hardpoint-external-launcher",
}
"""Where our own plugins are. No command is made of what somebody typed: whoever registers a typing
error at a package index would be installed by it.
"""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the close matches, or nothing."""
    return _question(close(name, names))


def _question(matches: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def meant(name: str, plugins: Sequence[Plugin]) -> str:
    """Return what ``name`` may stand for among ``plugins``, or nothing.

    Knows the names that are not configuration names too: a distribution's and a module's, and what
    a distribution calls itself after its family: ``multiproc`` of ``hardpoint-multiproc``.
    """
    plugins = [plugin for plugin in plugins if plugin.kind != "command"]
    tails: dict[str, str] = {}
    for plugin in plugins:
        tail = plugin.distribution.replace("-", "_").partition("_")[2]
        tails.setdefault(tail, plugin.name)
        module = plugin.entry_point.partition(":")[0]
        others = {plugin.distribution, plugin.distribution.replace("-", "_"), module}
        others |= {module.partition(".")[0], tail}
        if name in others:
            return f"Did you mean {plugin.name!r}? Plugins are named as `hardpoint plugins` prints."
    near = close(name, {plugin.name for plugin in plugins})
    near = near or list(dict.fromkeys(tails[tail] for tail in close(name, tails)))
    return _question(near)


def how_to_install(name: str) -> str:
    """Return the sentence that says how to get a plugin called ``name``."""
    if name in _OURS:
        return f"To add it: pip install {_OURS[name]}."
    return "To add one: pip install the distribution that offers it (ours: hardpoint-NAME)."


def not_found(kind: str, name: str, plugins: Sequence[Plugin]) -> PluginNotFoundError:
    """Return the error for a plugin that was asked for by name and is not installed; ``kind`` is
    ``"plugin"`` where any kind would do.
    """
    plugins = [plugin for plugin in plugins if plugin.kind != "command"]
    same_kind = [plugin for plugin in plugins if kind in (plugin.kind, "plugin")]
    other = next((p for p in plugins if p.name == name and p not in same_kind), None)
    if other is not None:
        hint = f"{name!r} is an {other.kind}." if other.kind[0] in "aeiou" else ""
        hint = hint or f"{name!r} is a {other.kind}."
    else:
        hint = meant(name, same_kind)
    installed = ", ".join(dict.fromkeys(f"{p.name} ({p.provider})" for p in same_kind)) or "none"
    sentences = (
        f"No {kind} named {name!r} is installed.",
        hint,
        f"Installed {kind}s: {installed}.",
        how_to_install("" if hint else name),
    )
    return PluginNotFoundError(" ".join(filter(None, sentences)))


def unknown_names(config: Config, plugins: Sequence[Plugin]) -> list[Problem]:
    """Return a Problem for each plugin name in ``config`` that nothing installed has.

    Looks at ``plugins.disable``, ``plugins.provider`` and the tables ``plugins.NAME``.
    """
    names = {plugin.name for plugin in plugins if plugin.kind != "command"}
    section = config.plugins
    problems = [
        _unknown("plugins.disable", name, plugins) for name in section.disable if name not in names
    ]
    problems += [
        _unknown(f"plugins.{name}", name, plugins) for name in section.settings if name not in names
    ]
    for name, distribution in section.provider.items():
        key = f"plugins.provider.{name}"
        if name not in names:
            problems.append(_unknown(key, name, plugins))
            continue
        claims = [plugin for plugin in plugins if plugin.name == name]
        if normalized(distribution) not in {normalized(p.distribution) for p in claims}:
            known = " and ".join(dict.fromkeys(p.provider for p in claims))
            problems.append(
                Problem(
                    key=key,
                    value=distribution,
                    message=f"this distribution provides no plugin {name!r}.",
                    way_out=f"It is provided by {known}.",
                )
            )
    return [evolve(problem, origin=_origin(config, problem.key)) for problem in problems]


def _origin(config: Config, key: str) -> str:
    exact = config.origins.get(key)
    below = (who for path, who in config.origins.items() if path.startswith(f"{key}."))
    return exact or next(below, "")


def _unknown(key: str, name: str, plugins: Sequence[Plugin]) -> Problem:
    known = sorted({plugin.name for plugin in plugins if plugin.kind != "command"})
    if any(plugin.name == name for plugin in plugins):
        hint = f"{name!r} is a command; it is loaded only when it is typed."
    else:
        hint = meant(name, plugins)
    installed = f"Installed: {', '.join(known) or 'none'}."
    return Problem(
        key=key,
        value=name,
        message="no plugin of that name is installed.",
        way_out=f"{hint} {installed}".strip(),
    )
