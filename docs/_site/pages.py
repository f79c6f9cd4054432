"""A Sphinx extension: puts what is read off the code where a page has a marker.

``<!-- generated: NAME -->`` in a page is replaced by what ``TABLES[NAME]()`` returns (Markdown).
Links that leave the folder of pages become the path as text: the site has no copy of the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import commands
import errors
import hooks
import lifecycle
import tables

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
ROOT = Path(__file__).resolve().parents[2]

TABLES: Mapping[str, Callable[[], str]] = {
    "keys": tables.keys,
    "capabilities": tables.capabilities,
    "stages": tables.stages,
    "hooks": hooks.summary,
    "hook_sections": hooks.sections,
    "errors": errors.sections,
    "commands": commands.sections,
    "sampling_flags": commands.sampling,
    "lifecycle_picture": lifecycle.picture,
    "lifecycle_order": lifecycle.order,
}


def complete(page: str) -> str:
    """Return a page's text with its generated parts, and links for the site."""
    text = MARKER.sub(lambda found: TABLES[found[1]](), page)
    return OUTWARD.sub(_path_of, text)


def _path_of(link: re.Match[str]) -> str:
    path = link[2].removeprefix("../")
    if not (ROOT / path).exists():
        raise ValueError(f"a page leads to {path}, which is not there")
    shown = link[1].strip("`")
    return f"`{path}`" if path.endswith(shown) else f"{link[1]} (`{path}`)"


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect(
        "source-read", lambda _app, _name, source: source.__setitem__(0, complete(source[0]))
    )
    return {"parallel_read_safe": True}
