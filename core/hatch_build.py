# ruff: noqa: INP001 - hatchling finds it by its path
"""Compiles the channel's hot path into the package, when a wheel or an editable install is built.

Where that cannot be, the wheel has none, and a file in its place that says why: calls then go
through Python code that does the same, and `hardpoint doctor` tells. The compiler is `$CC`, or the
first of cc, gcc and clang that there is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = Path("src/hardpoint/rpc/shared_memory")
REASON = "not_built.txt"
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


class CannotBuildError(Exception):
    """Why there is no module."""


def build(source: Path, target: Path) -> None:
    """Compile the module at ``target``, which appears whole or not at all. Raises
    CannotBuildError with the compiler's last words.
    """
    if not sys.platform.startswith("linux") or sys.implementation.name != "cpython":
        raise CannotBuildError("it is for CPython on Linux")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotBuildError("it relies on the interpreter's lock, which this Python has not")
    names = (os.environ["CC"],) if os.environ.get("CC") else ("cc", "gcc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise CannotBuildError("there was no C compiler when hardpoint was installed")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build") as folder:
        made = Path(folder, target.name)
        include = f"-I{sysconfig.get_path('include')}"
        command = [compiler, *FLAGS, include, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler
        if done.returncode:
            raise CannotBuildError(f"{compiler} failed: {' '.join(done.stderr.split())[-400:]}")
        made.replace(target)


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the module unless it is newer than all that it is made of."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        source, folder = root / "native/ring.c", root / PLACE
        target = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        reason = folder / REASON
        newest = max(path.stat().st_mtime for path in (source, Path(__file__)))
        if not target.is_file() or target.stat().st_mtime < newest:
            try:
                build(source, target)
            except CannotBuildError as error:
                target.unlink(missing_ok=True)
                reason.write_text(f"{error}\n", encoding="utf-8")
                build_data["artifacts"].append(f"/{PLACE}/{REASON}")
                self.app.display_warning(f"hardpoint: no compiled hot path: {error}")
                return
        reason.unlink(missing_ok=True)
        build_data["artifacts"].append(f"/{PLACE}/{target.name}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
