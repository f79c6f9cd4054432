"""Every error that is raised on purpose, read off the sources without importing them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from attrs import evolve, frozen

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("core", "engine", "runtime", "scaffold")
WAY_OUT = "What to do: "


@frozen(kw_only=True)
class ErrorClass:
    """A class of ours, and what it says of itself. ``exit_code`` None: its base's."""

    name: str
    module: str
    house: str
    bases: tuple[str, ...]
    text: str
    exit_code: int | None


def errors() -> list[ErrorClass]:
    """Return all that derive from HardpointError, the base classes first."""
    found = {each.name: each for each in _classes()}
    chosen = {"HardpointError": evolve(found["HardpointError"], exit_code=1)}
    while True:
        more = {
            each.name: evolve(each, exit_code=each.exit_code or chosen[base].exit_code)
            for each in found.values() if each.name not in chosen
            for base in each.bases[:1] if base in chosen
        }  # fmt: skip
        if not more:
            return sorted(chosen.values(), key=lambda each: HOUSES.index(each.house))
        chosen |= more


def _classes() -> list[ErrorClass]:
    return [
        _read(node, ".".join(path.relative_to(ROOT / house / "src").with_suffix("").parts), house)
        for house in HOUSES
        for path in sorted((ROOT / house / "src").glob("**/*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.match(r"[A-Z]\w*Error$", node.name)
    ]


def _read(node: ast.ClassDef, module: str, house: str) -> ErrorClass:
    codes = [
        each.value.value
        for each in node.body
        if isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(each.value, ast.Constant)
        and "exit_code" in ast.unparse(each).partition("=")[0]
    ]  # fmt: skip
    return ErrorClass(
        name=node.name, module=module, house=house, text=ast.get_docstring(node) or "",
        bases=tuple(map(ast.unparse, node.bases)), exit_code=codes[0] if codes else None,
    )  # fmt: skip


def sections() -> str:
    """Return a section for each error: when it is raised, what to do."""
    parts, house = [], ""
    for each in errors():
        if each.house != house:
            house = each.house
            parts.append(f"## From `{each.module.partition('.')[0]}`\n")
        bases = ", ".join(f"`{base}`" for base in each.bases)
        parts.append(f"### {each.name}\n")
        parts.append(
            f"`{each.module}.{each.name}`, derived from {bases}. Exit code {each.exit_code}.\n"
        )
        text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", each.text).replace("``", "`")
        parts.append(text.replace(WAY_OUT, f"**{WAY_OUT.strip()}** ") + "\n")
    return "\n".join(parts)
