"""What is deprecated goes when the contract number has come that was promised to remove it."""

from __future__ import annotations

import ast

import pytest
from hardpoint.deprecated import Deprecation

DEFAULT = "hardpoint"
"""The package whose number counts where a package has none of its own."""


def deprecations(source: str) -> list[tuple[int, Deprecation]]:
    """Return (line, deprecation) of each that a source makes; all its arguments are literals."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Deprecation":
            made = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
            found.append((node.lineno, Deprecation(**made)))
    return found


def number(source: str) -> tuple[int, int] | None:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "API":
            return ast.literal_eval(node.value)
    return None


def expired(source: str, api: tuple[int, int]) -> list[str]:
    return [
        f"line {line}: {each.what} was to go with API {each.removal[0]}.{each.removal[1]}"
        for line, each in deprecations(source) if each.expired(api)
    ]  # fmt: skip


SAMPLE = """
OLD = deprecated.Deprecation(what="'level'", instead="'tags'", since=(2, 1), removal=(4, 0))
"""


@pytest.mark.parametrize(("api", "told"), [((3, 9), 0), ((4, 0), 1), ((5, 2), 1)])
def test_the_search_finds_what_is_overdue(api, told):
    assert len(expired(SAMPLE, api)) == told


def test_nothing_that_is_deprecated_is_overdue(distributions):
    numbers = {}
    for package, folder in distributions.items():
        numbers[package] = number((folder / "src" / package / "__init__.py").read_text())
    assert numbers[DEFAULT] is not None
    for package, folder in distributions.items():
        for path in (folder / "src").glob("**/*.py"):
            overdue = expired(path.read_text(), numbers[package] or numbers[DEFAULT])
            assert not overdue, f"{path}: {overdue}. Remove it and its tests"
