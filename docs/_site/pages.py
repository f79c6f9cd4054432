"""A Sphinx extension: puts what is read off the code where a page has a marker.

``<!-- generated: NAME -->`` in a page is replaced by what ``TABLES[NAME]()`` returns (Markdown).
Links that leave the folder of pages become the path as text: the site has no copy of the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from pydoc import locate
from typing import Any

import commands
import errors
import hooks
import lifecycle
import suites
import support
import tables
from attrs import NOTHING, Attribute, Factory, fields, has

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
ROOT = Path(__file__).resolve().parents[2]

TABLES: Mapping[str, Callable[[], str]] = {
    "keys": tables.keys,
    "capabilities": tables.capabilities,
    "stages": tables.stages,
    "numbers": tables.numbers,
    "support_levels": support.levels,
    "support_results": support.results,
    "suites": suites.sections,
    "mutants": suites.mutants,
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


def without_signature(_app: Any, kind: str, _name: str, thing: Any, *_rest: Any) -> Any:
    """Drop the signature of a record: its fields are listed below its text."""
    return ("", None) if kind == "class" and (has(thing) or is_enum(thing)) else None


def with_fields(
    _app: Any, kind: str, _name: str, thing: Any, _options: Any, lines: list[str]
) -> None:
    """List the fields of a record, or the members of an enumeration, with types and defaults."""
    if kind != "class" or not (has(thing) or is_enum(thing)):
        return
    if is_enum(thing):
        listed = [f"{each.name} = {each.value!r}" for each in thing]
    else:
        listed = [f"{each.name}: {_type_of(each)}{_default_of(each)}" for each in fields(thing)]
    if listed:
        lines += ["", ".. code-block:: python", "", *(f"   {line}" for line in listed), ""]


def of_ours(_app: Any, _env: Any, node: Any, text: Any) -> Any:
    """Let a reference to what is in the code and not on the site be plain text; what is nowhere
    stays a warning.
    """
    target = str(node.get("reftarget", ""))
    return text if target.startswith("hardpoint") and locate(target) is not None else None


def is_enum(thing: Any) -> bool:
    """Whether ``thing`` is an enumeration."""
    return isinstance(thing, type) and issubclass(thing, Enum)


def _type_of(attribute: Attribute[Any]) -> str:
    kind = attribute.type
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def _default_of(attribute: Attribute[Any]) -> str:
    if attribute.default is NOTHING:
        return ""
    if isinstance(attribute.default, Factory):
        made = attribute.default.factory
        shown = {dict: "{}", list: "[]"}.get(made, "...")
        return (
            f" = {made.__name__}()" if isinstance(made, type) and shown == "..." else f" = {shown}"
        )
    return f" = {attribute.default!r}"


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("missing-reference", of_ours)
    app.connect("autodoc-process-signature", without_signature)
    app.connect("autodoc-process-docstring", with_fields)
    app.connect(
        "source-read", lambda _app, _name, source: source.__setitem__(0, complete(source[0]))
    )
    return {"parallel_read_safe": True}
