"""Deprecations: at the right line, once, by Python's own memory of what was warned about."""

from __future__ import annotations

import types
import warnings
from pathlib import Path

import pluggy
import pytest
from hardpoint.deprecated import Deprecation, HardpointDeprecationWarning, warn_caller

OLD = Deprecation(what="argument 'level'", instead="'tags'", since=(2, 1), removal=(4, 0))
TEXT = "argument 'level' is deprecated since API 2.1 and goes with API 4.0; use 'tags' instead"


def module_of(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(source, f"/{name}.py", "exec"), module.__dict__)
    return module


def test_the_caller_outside_the_package_is_warned_however_deep_the_call():
    inside = module_of(
        "hardpoint.pretended",
        "def deep(warn, old):\n    warn(old)\ndef old(warn, old):\n    deep(warn, old)\n",
    )
    with pytest.warns(HardpointDeprecationWarning, match=TEXT) as caught:
        inside.old(warn_caller, OLD)
    (warning,) = caught
    assert warning.filename == __file__
    lines = Path(__file__).read_text().splitlines()
    assert "inside.old(warn_caller, OLD)" in lines[warning.lineno - 1]


def test_a_package_with_a_similar_name_is_outside():
    outside = module_of("hardpoint_other", "def use(warn, old):\n    warn(old)\n")
    with pytest.warns(HardpointDeprecationWarning) as caught:
        outside.use(warn_caller, OLD)
    assert (caught[0].filename, caught[0].lineno) == ("/hardpoint_other.py", 2)


def test_each_line_is_warned_once():
    user = module_of("hardpoint_user", "def use(warn, old):\n    warn(old)\n    warn(old)\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            user.use(warn_caller, OLD)
    assert [warning.lineno for warning in caught] == [2, 3]


def test_the_implementer_of_an_old_hook_argument_is_warned_at_the_definition():
    class Hooks:
        @pluggy.HookspecMarker("acme")(warn_on_impl_args={"level": OLD.warning})
        def hook(self, tags, level):
            """A hook with an argument that goes."""

    plugin = module_of(
        "acme_plugin",
        "import pluggy\n@pluggy.HookimplMarker('acme')\ndef hook(tags, level):\n    pass\n",
    )
    manager = pluggy.PluginManager("acme")
    manager.add_hookspecs(Hooks)
    with pytest.warns(HardpointDeprecationWarning, match=TEXT) as caught:
        manager.register(plugin)
    assert [(each.filename, each.lineno) for each in caught] == [("/acme_plugin.py", 2)]


def test_who_was_built_for_the_number_before_is_served_until_the_removal():
    with pytest.raises(ValueError, match=r"Remove it in 4\.0"):
        Deprecation(what="it", instead="that", since=(2, 0), removal=(3, 0))


@pytest.mark.parametrize(
    ("api", "expired"), [((2, 1), False), ((3, 9), False), ((4, 0), True), ((4, 1), True)]
)
def test_it_expires_with_the_number_that_it_names(api, expired):
    assert OLD.expired(api) is expired
