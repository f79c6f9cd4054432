# ruff: noqa: INP001 - hatchling finds it by its path
"""Compiles the native library into the package, when a wheel or an editable install is built.

Where that cannot be, the wheel has none, and a file in its place that says why: models then run
through torch, and `hardpoint doctor` tells. The compiler is `$CXX`, or the first of c++, g++ and
clang++ that there is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "libhardpoint_cpu.so"
REASON = "not_built.txt"
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread",
    "-fvisibility=hidden", "-Wno-psabi",
)  # fmt: skip
LEVELS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mfma",
        "-mf16c",
    ),
}
"""The flags of each level; all but the first are of x86 processors."""
PLAIN = (
    "team.cpp", "program.cpp", "execution.cpp", "experts.cpp", "packing.cpp", "sampling.cpp",
    "scoring.cpp",
    "testing.cpp",
)  # fmt: skip


class CannotBuildError(Exception):
    """Why there is no library."""


def compiler() -> str:
    """Return the C++ compiler's path. Raises CannotBuildError."""
    for name in (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise CannotBuildError("there was no C++ compiler when hardpoint-cpu was installed")


def build(sources: Path, target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile the library at ``target``, which appears whole or not at all. Raises
    CannotBuildError with the compiler's last words.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    compile_ = (compiler(), *flags)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build") as folder:
        parts = {name: ("-c", name) for name in PLAIN} | {
            level: (*options, f"-DLEVEL={level}", "-c", "kernels.cpp")
            for level, options in LEVELS.items()
            if x86 or not options
        }
        objects = [f"{folder}/{name}.o" for name in parts]
        jobs = [
            (*compile_, *part, "-o", out) for part, out in zip(parts.values(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run(job, sources), jobs))
        _run((*compile_, "-shared", "-o", f"{folder}/{LIBRARY}", *objects), sources)
        Path(folder, LIBRARY).replace(target)


def _run(command: tuple[str, ...], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler
    if done.returncode:
        raise CannotBuildError(f"{command[0]} failed: {' '.join(done.stderr.split())[-400:]}")


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library unless it is newer than all that it is made of."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        sources, built = root / "native", root / "src/hardpoint_cpu/native/lib"
        built.mkdir(exist_ok=True)
        target, reason = built / LIBRARY, built / REASON
        made_of = [*sources.iterdir(), Path(__file__)]
        newest = max(path.stat().st_mtime for path in made_of)
        if not target.is_file() or target.stat().st_mtime < newest:
            try:
                build(sources, target)
            except CannotBuildError as error:
                target.unlink(missing_ok=True)
                reason.write_text(f"{error}\n", encoding="utf-8")
                self.app.display_warning(f"hardpoint-cpu: no native library: {error}")
                return
        reason.unlink(missing_ok=True)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().translate({45: 95, 46: 95})}"
