"""Who may import what: checked in fresh processes where it matters, in the source elsewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "jax", "transformers")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(source: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ["hardpoint", "hardpoint_engine"])
def test_core_and_engine_import_no_array_library(package):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
names = [module.name for module in pkgutil.walk_packages(package.__path__, {package!r} + ".")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), sorted(set(sys.modules) & set({HEAVY!r})))
"""
    count, loaded = run(code).split(maxsplit=1)
    assert int(count) > 5
    assert loaded.strip() == "[]"


def test_importing_core_runs_no_plugin():
    out = run(
        "import hardpoint, sys; print([m for m in sys.modules if m.startswith('hardpoint_')])"
    )
    assert out.strip() == "[]"


def test_core_and_engine_name_no_array_library(distributions):
    for package in ("hardpoint", "hardpoint_engine"):
        for source in (distributions[package] / "src").glob("**/*.py"):
            assert not imported_by(source) & set(HEAVY), source


def test_plugin_modules_are_light(sources):
    plugins = [path for path in sources if path.name == "plugin.py"]
    assert len(plugins) >= 3
    for source in plugins:
        nodes = ast.walk(ast.parse(source.read_text()))
        own = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
        assert not own, f"{source} imports from its own package"
        allowed = set(sys.stdlib_module_names) | {"hardpoint"}
        assert imported_by(source) <= allowed, f"{source} imports more than the standard library"


def test_a_distribution_imports_only_what_it_declares(distributions):
    """A probe for the conformance kit may need the kit: it is for tests, and an extra."""
    for package, folder in distributions.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        kit = project.get("optional-dependencies", {}).get("conformance", ())
        lines = (*project["dependencies"], *kit)
        declared = {re.split(r"[<>=!~\[ ;]", line)[0] for line in lines}
        allowed = {name.replace("-", "_") for name in declared} | {package}
        for source in (folder / "src").glob("**/*.py"):
            ours = {name for name in imported_by(source) if name.split("_")[0] == "hardpoint"}
            assert ours <= allowed, f"{source} imports {ours - allowed}, undeclared by {folder}"


def test_distributions_declare_what_they_import(distributions):
    """Third-party imports are declared too, under their name on an index, or in an extra."""
    names = {"attr": "attrs", "importlib_metadata": "importlib-metadata", "zmq": "pyzmq"}
    for package, folder in distributions.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
        declared = {re.split(r"[<>=!~\[ ;]", line)[0] for line in lines}
        for source in (folder / "src").glob("**/*.py"):
            foreign = imported_by(source) - set(sys.stdlib_module_names) - {package}
            for name in foreign:
                wanted = names.get(name, name).replace("_", "-")
                assert wanted in declared, f"{source} imports {name}, undeclared by {folder}"
