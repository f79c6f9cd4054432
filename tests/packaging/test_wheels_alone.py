"""Every distribution builds a wheel that carries what it needs and works beside what it declares.

Each wheel is unpacked into a folder of its own together with the wheels of those of our
distributions that it requires, and imported by an interpreter that sees nothing else of this
repository.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(
    path.parent for path in ROOT.glob("**/pyproject.toml")
    if ".venv" not in path.parts and (path.parent / "src").is_dir()
)  # fmt: skip

PROBE = """
import importlib, pkgutil, sys
sys.path[:0] = [{site!r}]
sys.path.insert(0, {target!r})
package = importlib.import_module({package!r})
assert package.__file__.startswith({target!r}), package.__file__
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print("imported")
"""


@pytest.fixture(scope="session")
def wheels(wheelhouse) -> dict[str, Path]:
    """Distribution name -> wheel."""
    return {metadata(path)["Name"]: path for path in wheelhouse.glob("*.whl")}


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def ours_required_by(name: str, wheels: dict[str, Path]) -> set[str]:
    """The distributions of this repository that ``name`` requires, itself included, all the way
    down; the conformance kit, too, where it is an extra: probes import it.
    """
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        for line in metadata(wheels[current]).get_all("Requires-Dist") or []:
            required = re.match(r"[A-Za-z0-9_.-]+", line).group()
            if required in wheels and ("extra ==" not in line or "conformance" in line):
                todo.append(required)
    return found


def test_every_distribution_builds(wheels):
    assert len(wheels) == len(FOLDERS) >= 6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_wheel_works_beside_what_it_declares(folder, wheels, tmp_path):
    text = (folder / "pyproject.toml").read_text()
    name = re.search(r'^name = "(.+)"', text, re.MULTILINE).group(1)
    for required in ours_required_by(name, wheels):
        with zipfile.ZipFile(wheels[required]) as archive:
            archive.extractall(tmp_path)
    package = name.replace("-", "_")
    assert (tmp_path / package / "py.typed").exists()
    site = sysconfig.get_path("purelib")
    code = PROBE.format(site=site, target=str(tmp_path), package=package)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported"


def test_wheels_say_what_a_person_wants_to_know(wheels):
    for wheel in wheels.values():
        found = metadata(wheel)
        assert found["License-Expression"] == "Apache-2.0"
        assert found["Requires-Python"] == ">=3.11"
        assert found["Description-Content-Type"] == "text/markdown"
        assert len(found.get_payload()) > 200, f"{wheel.name}: its README says too little"
