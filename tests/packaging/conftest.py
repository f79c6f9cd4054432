"""Our wheels, built once for all tests of a run, and environments that have nothing but wheels."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(
    path.parent for path in ROOT.glob("**/pyproject.toml")
    if ".venv" not in path.parts and (path.parent / "src").is_dir()
)  # fmt: skip
QUIET_PIP = ("--quiet", "--no-index", "--disable-pip-version-check")


def build(*folders: Path, into: Path) -> None:
    """Build a wheel of each project, with the build backends that are installed here."""
    command = [sys.executable, "-m", "pip", "wheel", *QUIET_PIP, "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(into), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def write_wheel(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    requires: str = "hardpoint>=0.1",
    entry_points: Mapping[str, Mapping[str, str]],
    files: Mapping[str, str],
) -> Path:
    """Write a wheel, whose format is simple enough to need no build backend. ``entry_points`` is
    kind -> name -> value; ``files`` is name -> text, below a package named as the distribution.
    """
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    content = {f"{package}/__init__.py": ""}
    content |= {f"{package}/{file}": textwrap.dedent(text) for file, text in files.items()}
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {requires}\n"
    )
    content[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    content[f"{info}/entry_points.txt"] = "".join(
        f"[hardpoint.{kind}s]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for kind, entries in entry_points.items()
    )
    record = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (content | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture(scope="session")
def wheel_of() -> Callable[..., Path]:
    """Return :func:`write_wheel`."""
    return write_wheel


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory) -> Path:
    """A folder with a wheel of every distribution of this repository, one for all processes that
    run its tests side by side.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheelhouse"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            build(*FOLDERS, into=unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def third_party(tmp_path_factory) -> Path:
    """What is installed here and is not ours, as a folder for ``sys.path``: links, so that nothing
    is fetched. Editable installs (``.pth`` files) are not in it.
    """
    folder = tmp_path_factory.mktemp("third-party")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(site).iterdir():
            if path.suffix != ".pth" and not path.name.startswith("hardpoint"):
                (folder / path.name).symlink_to(path)
    return folder


class WheelEnvironment:
    """A virtual environment that sees third-party packages and none of this repository, until
    wheels are installed into it; with pip's own resolution.
    """

    def __init__(self, folder: Path, third_party: Path, wheelhouse: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder, self.wheelhouse = folder, wheelhouse
        self.python = str(folder / "bin" / "python")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        (self.site / "third_party.pth").write_text(f"{third_party}\n")

    def installing(self, *what: object) -> list[str]:
        """``pip install WHAT``: names, wheels or folders; nothing comes from an index."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", *QUIET_PIP]
        command += ["--no-compile", "--no-build-isolation", "--find-links", str(self.wheelhouse)]
        return [*command, *map(str, what)]

    def install(self, *what: object) -> None:
        """Run that command."""
        done = subprocess.run(
            self.installing(*what), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(
        self, *arguments: object, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS``, with none of the variables that would let it see more."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HARDPOINT_", "PYTHON"))}
        return subprocess.run(
            [self.python, *map(str, arguments)], capture_output=True, text=True, timeout=600,
            check=False, env={**kept, **variables}, cwd=cwd or self.folder,
        )  # fmt: skip

    def hardpoint(self, *arguments: object, **more) -> subprocess.CompletedProcess[str]:
        """``hardpoint ARGUMENTS``, by the script that pip made."""
        return self.run(self.folder / "bin" / "hardpoint", *arguments, **more)

    def code(self, text: str, *arguments: object, **more) -> str:
        """Run a program, which must succeed; return what it printed."""
        done = self.run("-c", textwrap.dedent(text), *arguments, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def wheel_environment(tmp_path, third_party, wheelhouse) -> Iterator[WheelEnvironment]:
    """An environment of its own for one test."""
    return WheelEnvironment(tmp_path / "environment", third_party, wheelhouse)


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory, third_party, wheelhouse) -> WheelEnvironment:
    """An environment for all tests of a file: each says what it installs, none takes it away."""
    return WheelEnvironment(tmp_path_factory.mktemp("shared"), third_party, wheelhouse)
