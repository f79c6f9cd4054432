"""Every hook says what its page reads off it, and its example would be taken as it stands."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
from hardpoint import hookspecs

HOOKS = [name for name in vars(hookspecs) if name.startswith("hardpoint_")]


def example_of(name: str) -> ast.FunctionDef:
    _, _, text = inspect.getdoc(getattr(hookspecs, name)).partition("Example::\n")
    (function,) = ast.parse(textwrap.dedent(text)).body
    return function


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_implements_the_hook(name):
    function = example_of(name)
    assert function.name == name
    assert [ast.unparse(each) for each in function.decorator_list] == ["hookimpl"]
    taken = [each.arg for each in function.args.args]
    assert set(taken) <= set(inspect.signature(getattr(hookspecs, name)).parameters)


@pytest.mark.parametrize("name", HOOKS)
def test_the_docstring_says_in_which_process(name):
    text = " ".join(inspect.getdoc(getattr(hookspecs, name)).split())
    called = text.partition("Called ")[2].partition(".")[0]
    assert "driver" in called or "worker" in called
