"""The hooks, read off ``hookspecs.py``: the table of all, and a section for each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hardpoint import hookspecs
from hardpoint.offers import UNUSED
from tables import table

_PLACE = r"(?:the |every |each )?\w+"
_CALLED = re.compile(rf"Called (?:by discovery )?in ({_PLACE}(?:,? and in {_PLACE})?)")
_GROUP = re.compile(r"^# (.+)$|^def (hardpoint_\w+)", re.MULTILINE)


def specifications() -> dict[str, str]:
    """Return the name of each hook -> its docstring, in the order of the file."""
    found = {name: each for name, each in vars(hookspecs).items() if name.startswith("hardpoint_")}
    return {name: inspect.cleandoc(each.__doc__) for name, each in found.items()}


def where(name: str, text: str) -> str:
    """Return in which processes a hook is called, as its docstring says."""
    called = _CALLED.search(" ".join(text.split()))
    places = [place for place in ("driver", "worker") if called and place in called[1]]
    if not places:
        raise ValueError(f"the docstring of {name} does not say in which process it is called")
    return " and ".join("workers" if place == "worker" else place for place in places)


def summary() -> str:
    """Return the table of all hooks."""
    rows = []
    for name, text in specifications().items():
        first = " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        first = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", first)
        rows.append((f"[`{name}`](#{name})", first, where(name, text)))
    return table(("hook", "what an implementation does", "called in"), rows)


def sections() -> str:
    """Return a section for each hook, under the headings of the file."""
    source = Path(inspect.getfile(hookspecs)).read_text()
    parts = []
    for found in _GROUP.finditer(source):
        if found[1]:
            parts.append(f"## {found[1].rstrip('.')}\n")
            continue
        parts.append(f"### {found[2]}\n")
        if found[2] in UNUSED:
            parts.append(
                "*Declared, and not yet asked by anything: a plugin that has it is told so.*\n"
            )
        parts.append(f"```{{eval-rst}}\n.. autofunction:: hardpoint.hookspecs.{found[2]}\n```\n")
    return "\n".join(parts)
